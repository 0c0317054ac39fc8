"""Machine code of CUDA kernels: loops, and the instructions that a run through one executes."""

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
GUARD = re.compile(r"^@!?U?P\w+\s+")
BRANCHES = ("BRA", "BRX", "JMP", "JMX")
ENDS = ("EXIT", "RET")
ANONYMOUS = re.compile(r"(_GLOBAL__N_|_INTERNAL_)\w*::|\(anonymous namespace\)::|\blctx_(cuda_)?")
DIMENSIONS = {"HMMA": {"16816": (16, 8, 16), "1688": (16, 8, 8)},
              "IMMA": {"16832": (16, 8, 32), "16816": (16, 8, 16), "8816": (8, 8, 16)}}  # fmt: skip
WARPGROUP = re.compile(r"[HI]GMMA\.(\d+)x(\d+)x(\d+)")
WARPS = 4  # of a warpgroup

Measure = Callable[[str], int]  # of an instruction without its guard


@dataclass(frozen=True)
class Instruction:
    """An instruction as the disassembler writes it."""

    text: str

    @property
    def bare(self) -> str:
        """Without the predicate that guards it."""
        return GUARD.sub("", self.text)

    @property
    def targets(self) -> list[str]:
        """The labels where it may continue; empty when it is not a branch.

        The compiler also leaves a loop by a call that does not come back.
        """
        branches = self.name in BRANCHES or self.bare.startswith("CALL.REL.NOINC")
        return re.findall(r"\.L_\w+", self.bare) if branches else []

    @property
    def name(self) -> str:
        return re.split(r"[.\s]", self.bare, maxsplit=1)[0]

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        if self.text.startswith("@"):
            return True
        if self.name in ("BRX", "JMX", *ENDS):
            return False
        return self.name not in BRANCHES or "," in self.bare.split("(")[0]  # a predicate as an operand


@dataclass
class Code:
    """Instructions of a kernel, and where its labels are."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[range]:
        """Basic blocks, as ranges of instructions."""
        n = len(self.instructions)
        starts = {0, *self.labels.values()}
        starts |= {i + 1 for i, x in enumerate(self.instructions) if x.targets or not x.falls_through}
        at = sorted(start for start in starts if start < n)
        return [range(a, b) for a, b in zip(at, [*at[1:], n], strict=True)]

    @cached_property
    def successors(self) -> list[list[int]]:
        """The blocks that may follow each block."""
        number = {block.start: i for i, block in enumerate(self.blocks)}
        after = []
        for i, block in enumerate(self.blocks):
            last = self.instructions[block[-1]]
            found = {number[self.labels[label]] for label in last.targets if self.labels.get(label) in number}
            if last.falls_through and i + 1 < len(self.blocks):
                found.add(i + 1)
            after.append(sorted(found))
        return after

    @cached_property
    def loops(self) -> list["Loop"]:
        """Natural loops: those with one entry, to which a block that it dominates goes back."""
        order = reverse_postorder(self.successors)
        dominators = dominators_of(self.successors, order)
        latches = defaultdict(set)
        for block in order:
            for to in self.successors[block]:
                if to in dominators[block]:
                    latches[to].add(block)
        before = predecessors_of(self.successors)
        return [Loop(self, head, body_of(head, ends, before), ends) for head, ends in latches.items()]

    def loops_with(self, measure: Measure) -> list["Loop"]:
        """Return the loops that have what is measured, without those around them."""
        found = [loop for loop in self.loops if loop.total(measure)]
        return [loop for loop in found if not any(other.body < loop.body for other in found)]


@dataclass(frozen=True)
class Loop:
    """Blocks of a natural loop."""

    code: Code
    head: int
    body: frozenset[int]
    latches: frozenset[int]

    def total(self, measure: Measure) -> int:
        """Return the sum of what is measured over all instructions."""
        return sum(self._of(block, measure) for block in self.body)

    def executed(self, measure: Measure) -> tuple[int, int]:
        """Return what is measured and the number of instructions, on the way that has most of it and is shortest.

        What is rare has a branch around it. Loops inside count once. Values with f16 sums are multiplied again, with
        f32 sums, where one is not finite: no way leads there. Fillers between matrix products are not counted: ptxas
        puts one between two of them for sm_120, and it is issued while the tensor core is busy.
        """
        again = self._multiplied_again()
        inside = [
            [to for to in after if to in self.body and to != self.head and to not in again]
            for after in self.code.successors
        ]
        best = {self.head: self._cost(self.head, measure)}
        order = [block for block in reverse_postorder(inside, self.head) if block in self.body]
        place = {block: i for i, block in enumerate(order)}
        for block in order:
            for to in inside[block]:
                if place[to] > place[block]:  # not back in a loop inside
                    way = tuple(a + b for a, b in zip(best[block], self._cost(to, measure), strict=True))
                    best[to] = max(best.get(to, way), way)
        most, length = max(best[latch] for latch in self.latches if latch in best)
        return most, -length

    def _multiplied_again(self) -> set[int]:
        if not self.total(half_sums):
            return set()
        return {
            block
            for block in self.body
            if self._of(block, products) and self._of(block, transposed_loads) and not self._of(block, half_sums)
        }

    def _cost(self, block: int, measure: Measure) -> tuple[int, int]:
        return self._of(block, measure), -self._of(block, counted)

    def _of(self, block: int, measure: Measure) -> int:
        return sum(measure(self.code.instructions[i].bare) for i in self.code.blocks[block])


def reverse_postorder(successors: Sequence[Sequence[int]], first: int = 0) -> list[int]:
    """Return the blocks that can be reached, each before those that follow it, except for back edges."""
    seen, order, stack = {first}, [], [(first, iter(successors[first]))]
    while stack:
        block, rest = stack[-1]
        to = next((to for to in rest if to not in seen), None)
        if to is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(to)
            stack.append((to, iter(successors[to])))
    return order[::-1]


def predecessors_of(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in successors]
    for block, after in enumerate(successors):
        for to in after:
            before[to].append(block)
    return before


def dominators_of(successors: Sequence[Sequence[int]], order: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return for every block those through which every way to it goes."""
    before, every = predecessors_of(successors), frozenset(order)
    found = dict.fromkeys(order, every) | {order[0]: frozenset(order[:1])}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = frozenset.intersection(*(found[b] for b in before[block] if b in found)) | {block}
            changed |= new != found[block]
            found[block] = new
    return found


def body_of(head: int, latches: set[int], before: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the blocks from which a latch can be reached without the head."""
    body, todo = {head, *latches}, [latch for latch in latches if latch != head]
    while todo:
        new = [block for block in before[todo.pop()] if block not in body]
        body.update(new)
        todo += new
    return frozenset(body)


def products(instruction: str) -> int:
    """Return the multiplications of a matrix instruction of a warp, 0 of any other.

    Of a product of a warpgroup, a warp has a quarter.

    Examples
    --------
    >>> products("HMMA.16816.F32 R4, R8, R12, R4"), products("IADD3 R0, R0, 0x1, RZ")
    (2048, 0)
    """
    name, _, rest = instruction.partition(".")
    if group := WARPGROUP.match(instruction):
        m, n, k = map(int, group.groups())
        return m * n * k // WARPS
    m, n, k = DIMENSIONS.get(name, {}).get(rest.split(".")[0], (0, 0, 0))
    return m * n * k


def counted(instruction: str) -> int:
    """Return 1 for every instruction but a filler."""
    return int(instruction != "NOP")


def half_sums(instruction: str) -> int:
    """Return the multiplications of an instruction whose sums are f16 numbers."""
    return products(instruction) if re.match(r"HMMA\.\d+\.F16\b", instruction) else 0


def octets(instruction: str) -> int:
    """Return how many times 8 halves a thread stores in shared memory."""
    return int(instruction.startswith("STS.128"))


def packed_floats(instruction: str) -> int:
    """Return 1 where two floats become halves, which levels of quantized rows never are."""
    return int(instruction.startswith("F2FP"))


def transposed_loads(instruction: str) -> int:
    """Return 1 where matrices are loaded or multiplied transposed, which values are and keys are not."""
    return int((instruction.startswith("LDSM") and ".MT88" in instruction) or ".tnspB" in instruction)


def codes(nvdisasm: str, cubin: Path) -> Iterator[Code]:
    """Yield the kernels of a cubin."""
    done = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield from parse(done.stdout)


def parse(listing: str) -> Iterator[Code]:
    """Yield the kernels of what ``nvdisasm -c`` prints."""
    parts = SECTION.split(listing)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        code = Code(name)
        for line in body.splitlines():
            if label := LABEL.match(line.strip()):
                code.labels[label.group(1)] = len(code.instructions)
            elif instruction := INSTRUCTION.match(line):
                code.instructions.append(Instruction(instruction.group(1)))
        if code.instructions:
            yield code


def readable(names: Sequence[str]) -> list[str]:
    """Return mangled names as the source has them, without parameters, namespaces and prefixes."""
    if not (filter_names := shutil.which("c++filt")):
        return list(names)
    done = subprocess.run([filter_names, "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [ANONYMOUS.sub("", name).replace("> >", ">>") for name in done.stdout.splitlines()]
