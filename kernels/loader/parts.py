"""CUDA kernels of a file in several parts, which nvcc compiles at the same time: a command that torch takes for nvcc."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from .plan import Plan

__all__ = ["compiler_of_parts", "number_of_parts"]

_SCRIPT = """\
# nvcc for {parts} parts of the same kernels at the same time, whose objects are joined to one; the rest is said in parts.cuh.
left=$#
while [ $left -gt 0 ]; do
  case $1 in
    -o) out=$2; shift 2; left=$((left - 2)) ;;
    *) set -- "$@" "$1"; shift; left=$((left - 1)) ;;
  esac
done
objects= running=
for part in {numbers}; do
  {nvcc} "$@" -DJITACT_PARTS={parts} -DJITACT_PART=$part -o "$out.$part.o" >"$out.$part.log" 2>&1 &
  running="$running $part:$!" objects="$objects $out.$part.o"
done
for each in $running; do
  wait "${{each#*:}}" || failed="${{failed:-$out.${{each%:*}}.log}}"
done
cat "${{failed:-$out.0.log}}"  # what one says of the kernels, all say
[ -z "$failed" ] && {join} -r -nostdlib -o "$out" $objects
"""


def number_of_parts(plan: Plan, jobs: int) -> int:
    """How many are worth it, if ``jobs`` compilers may run at once: each reads all headers, and the CPU's kernels take one."""
    whole = 6 if plan.source.signature.folds else 8  # both directions of each dtype; rows are not computed in float64
    pieces = 2 if plan.source.row_types else whole
    return max(1, min(pieces, jobs // 2))


def compiler_of_parts(plan: Plan, parts: int, staging: Path) -> str:
    """What compiles ``parts`` of the plan's kernels with its nvcc, given what torch gives to nvcc; a script in ``staging``."""
    script = _SCRIPT.format(
        parts=parts,
        numbers=" ".join(map(str, range(parts))),
        nvcc=os.environ.get("PYTORCH_NVCC") or shlex.quote(plan.nvcc.path),
        join=shlex.quote(plan.cxx.path),
    )
    (staging / "nvcc.sh").write_text(script)
    return f"sh {shlex.quote(str(staging / 'nvcc.sh'))}"
