"""What people define: expressions, kernel files of their own, folders of both."""
