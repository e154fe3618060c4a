"""Random kernel files in the subset of C++ that ``compiling.reader`` supports, and their results by a C++ compiler.

Literals are finite: multiplied by an infinite one, the derivative 0 of a constant would be NaN in C++.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from jitact.definitions.signs import BINDING
from jitact.kernels.loader.source import DEVICE

TIGHT = 9  # the precedence of a name
UNARY = 7
INTS = ("0", "1", "2", "3", "4")
DOUBLES = ("0.0", "0.5", "1.", ".25", "2e0", "0x1p-3", "0x1.8p1", "1e-1", "3.0E+2", "00.5")
EXACT = ("abs", "floor", "ceil", "trunc", "sqrt", "square")  # exact in torch and in C, or defined in the file


@dataclass
class Writer:
    """Writes random expressions of a type, with the parentheses that C++ needs and a few redundant ones."""

    random: random.Random
    names: dict[str, list[str]] = field(default_factory=lambda: {"T": ["x", "z", "a"], "bool": [], "int": [], "double": []})

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def arithmetic(self) -> str:
        return self.pick("bool", "int", "int", "double")

    def any(self) -> str:
        return self.pick("T", "T", self.arithmetic())

    def write(self, type_: str, depth: int, tightness: int = 0) -> str:
        """An expression for an operand of an operator, in parentheses if its precedence is below ``tightness``."""
        text, binds = getattr(self, f"of_{type_}")(depth)
        return f"({text})" if binds < tightness or self.random.random() < 0.05 else text

    def two(self, types: tuple[str, str], sign: str, depth: int) -> tuple[str, int]:
        binds = BINDING[sign]
        return f"{self.write(types[0], depth, binds)} {sign} {self.write(types[1], depth, binds + 1)}", binds

    def with_t(self) -> tuple[str, str]:
        """Two types, at least one of which is T."""
        return self.random.choice([("T", "T"), ("T", self.arithmetic()), (self.arithmetic(), "T")])

    def choice(self, types: tuple[str, str], depth: int) -> tuple[str, int]:
        condition = self.write(self.pick("bool", "bool", "bool", "int"), depth, 1)
        return f"{condition} ? {self.write(types[0], depth)} : {self.write(types[1], depth)}", 0

    def of_T(self, depth: int) -> tuple[str, int]:
        if depth <= 0:
            return self.random.choice(self.names["T"]), TIGHT
        d, kind = depth - 1, self.random.random()
        if kind < 0.45:
            sign = self.pick("+", "-", "*", "*", "/")
            if sign == "/" and self.random.random() < 0.5:
                return f"{self.write('T', d, BINDING[sign])} / {self.pick('2', '3.', '0.5')}", BINDING[sign]
            return self.two(self.with_t() if sign != "/" else ("T", "T"), sign, d)
        if kind < 0.55:
            return f"{self.pick('-', '+', '- ')}{self.write('T', d, TIGHT)}", UNARY
        if kind < 0.68:
            return self.choice(self.with_t(), d)
        if kind < 0.74:
            a, b = self.with_t()
            return f"select({self.write('bool', d)}, {self.write(a, d)}, {self.write(b, d)})", TIGHT
        if kind < 0.82:
            return f"T({self.write(self.any(), d)})", TIGHT
        if kind < 0.86:
            return f"square<T>({self.write(self.any(), d)})", TIGHT
        if kind < 0.90:
            return f"{self.pick('min', 'max')}({self.write('T', d)}, {self.pick('1', '0.5', '-2', 'T(-1)')})", TIGHT
        if kind < 0.93:
            return f"clamp({self.write('T', d)}, -1, {self.pick('1.5', 'T(2)')})", TIGHT
        return f"{self.pick(*EXACT)}({self.write('T', d)})", TIGHT

    def of_bool(self, depth: int) -> tuple[str, int]:
        if depth <= 0:
            return self.random.choice(["true", "false", *self.names["bool"]]), TIGHT
        d, kind = depth - 1, self.random.random()
        if kind < 0.6:
            return self.two((self.any(), self.any()), self.pick("<", "<=", ">", ">=", "==", "!="), d)
        if kind < 0.8:
            return self.two((self.arithmetic(), self.arithmetic()), self.pick("&&", "||"), d)
        if kind < 0.92:
            return f"!{self.write(self.arithmetic(), d, UNARY)}", UNARY
        return self.pick(f"isnan({self.write('T', d)})", f"positive({self.write('T', d)})"), TIGHT

    def of_int(self, depth: int) -> tuple[str, int]:
        if depth <= 0:
            return self.random.choice([*INTS, *self.names["int"]]), TIGHT
        d, kind = depth - 1, self.random.random()
        if kind < 0.6:
            return self.two((self.pick("bool", "int"), self.pick("bool", "int")), self.pick("+", "-", "*"), d)
        if kind < 0.75:
            return f"{self.pick('-', '+')}{self.write(self.pick('bool', 'int'), d, TIGHT)}", UNARY
        return self.choice((self.pick("bool", "int"), "int"), d)

    def of_double(self, depth: int) -> tuple[str, int]:
        if depth <= 0:
            return self.random.choice([*DOUBLES, *self.names["double"]]), TIGHT
        d, kind = depth - 1, self.random.random()
        types = self.random.choice([("double", self.arithmetic()), (self.arithmetic(), "double")])
        if kind < 0.5:
            return self.two(types, self.pick("+", "-", "*"), d)
        if kind < 0.6:
            return f"{self.write(self.arithmetic(), d, BINDING['/'])} / {self.pick('2.', '0.5', '3e0')}", BINDING["/"]
        if kind < 0.7:
            return f"-{self.write('double', d, TIGHT)}", UNARY
        return self.choice(types, d)

    def body(self) -> str:
        """Declarations, assignments, and a return."""
        lines = []
        for k in range(self.random.randrange(4)):
            type_ = self.pick("T", "T", "bool", "int", "double")
            word = type_ if type_ in ("T", "bool") else "auto"
            value = self.write(self.any() if word == "T" else type_, 2)
            lines.append(f"{self.pick('const ', '')}{word} v{k} = {value};")
            if word == "T" and lines[-1].startswith("T") and self.random.random() < 0.5:
                lines.append(f"v{k} = {self.write(self.any(), 2)};")
            self.names[type_].append(f"v{k}")
        return " ".join([*lines, f"return {self.write('T', 4)};"])


def program(seed: int) -> str:
    """A kernel file's text without its first line."""
    writer = Writer(random.Random(seed))
    macros = ""
    for k, type_ in enumerate(writer.random.sample(("int", "double"), writer.random.randrange(3))):
        macros += f"#define KEPT_{k} {writer.of_double(1)[0] if type_ == 'double' else writer.of_int(1)[0]}\n"
        writer.names["double"].append(f"KEPT_{k}")  # expanded as text, perhaps without parentheses, as in C
    return macros + with_body(writer.body())


def with_body(text: str) -> str:
    """A kernel file whose ``forward`` has that body."""
    return (
        "ELEMENTWISE T square(T x) { return x * x; }\n"
        "ELEMENTWISE bool positive(T x) { return x > 0; }\n"
        f"ELEMENTWISE T forward(T x, T z, Number<T> a) {{ {text} }}\n"
    )


RUN = """
using D = Dual<Double>;
#define call(p) \\
  *to++ = p::forward(Double(x), Double(z), Number<Double>(Double(a))).v; \\
  *to++ = p::forward(D(Double(x), Double(1)), D(Double(z)), Number<D>(D(Double(a)))).derivative.v;
extern "C" void run(double x, double z, double a, double* to) {{
{calls}
}}
"""


def in_cpp(programs: list[str], inputs: Tensor, folder: Path) -> Tensor:
    """Values and derivatives by x of each program at each row ``x, z, a`` in float64, by a C++ compiler."""
    parts = ['#include "elementwise.cuh"\nusing namespace jitact;\n']
    for k, text in enumerate(programs):
        undefined = "".join(f"\n#undef KEPT_{each}" for each in range(2))
        parts.append(f"namespace p{k} {{\n{text}\n}}{undefined}\n")
    parts.append(RUN.format(calls="\n".join(f"call(p{k});" for k in range(len(programs)))))
    (folder / "programs.cpp").write_text("".join(parts))
    flags = ["-std=c++20", "-O0", "-w", "-ffp-contract=off", "-shared", "-fPIC", f"-I{DEVICE}"]
    done = subprocess.run(["c++", *flags, "programs.cpp", "-o", "run.so"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    run = ctypes.CDLL(str(folder / "run.so")).run
    run.argtypes = [ctypes.c_double] * 3 + [ctypes.c_void_p]
    found = torch.empty(len(inputs), len(programs), 2, dtype=torch.float64)
    for row, values in zip(found, inputs.tolist(), strict=True):
        run(*values, row.data_ptr())
    return found.permute(1, 2, 0)
