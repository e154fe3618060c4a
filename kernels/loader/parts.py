"""Compiles a kernel file in several parts in parallel, by scripts that torch runs in place of compilers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from .plan import Plan

__all__ = ["Parts", "number_of_parts", "write_compiler"]

_SCRIPT = """\
#!/bin/sh
# A compiler, for {parts} parts of the same kernels at the same time, whose objects are joined to one: see parts.cuh.
case " $* " in *" -c "*) ;; *) exec {compiler} "$@" ;; esac
left=$#
while [ $left -gt 0 ]; do
  case $1 in
    -o) out=$2; shift 2; left=$((left - 2)) ;;
    -MF | --dependency-output) shift 2; left=$((left - 2)) ;;  # one file for all; nobody reads it
    *) set -- "$@" "$1"; shift; left=$((left - 1)) ;;
  esac
done
objects= running=
for part in {numbers}; do
  {compiler} "$@" -DJITACT_PARTS={parts} -DJITACT_PART=$part -o "$out.$part.o" >"$out.$part.log" 2>&1 &
  running="$running $part:$!" objects="$objects $out.$part.o"
done
for each in $running; do
  wait "${{each#*:}}" || failed="${{failed:-$out.${{each%:*}}.log}}"
done
cat "${{failed:-$out.0.log}}"  # what one says of the kernels, all say
# A file's own functions that are not inline are in each part.
[ -z "$failed" ] && exec {join} -r -nostdlib -Wl,-z,muldefs -o "$out" $objects
"""


class Parts(NamedTuple):
    """The numbers of parts in which CPU and CUDA kernels are compiled."""

    cpu: int
    cuda: int


def number_of_parts(plan: Plan, jobs: int) -> Parts:
    """The numbers of parts for ``jobs`` compilers at once. Few are worth it, as each part parses all headers."""
    rows = plan.source.rows
    pieces = len(rows.kinds) if rows else 4 * _kinds(plan)
    shapes = rows.shapes if rows else 1
    for_gpus = jobs * 3 // 4 if plan.made_archs else 0
    for_cpu = jobs // (4 if plan.made_archs else 2)
    return Parts(*(max(1, min(most, each)) for most, each in ((pieces, for_cpu), (pieces * shapes, for_gpus))))


def _kinds(plan: Plan) -> int:
    """How many kinds of kernels there are: forward, backward and, if backward also reduces, the kernels for that."""
    try:
        signature = plan.source.signature
    except ValueError:  # the compiler says what is wrong
        return 2
    return 3 if signature.folds or any(operand.role != "element" for operand in signature.differentiable) else 2


def write_compiler(path: Path, compiler: str, parts: int, join: str) -> str:
    """Writes a script that takes the arguments of ``compiler`` and compiles ``parts`` parts in parallel; returns its command.

    Args:
        path: where to write it.
        compiler: the compiler's command.
        parts: the number of parts.
        join: the path of a C++ compiler, which links the parts' objects into one.
    """
    numbers = " ".join(map(str, range(parts)))
    path.write_text(_SCRIPT.format(parts=parts, numbers=numbers, compiler=compiler, join=shlex.quote(join)))
    path.chmod(0o700)
    return str(path)
