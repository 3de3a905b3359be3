"""Reads PTX: a kernel's instructions, with registers, labels and constants as numbers."""

import functools
import re
from array import array
from dataclasses import dataclass, field

#: What a register holds when a thread begins; as in machine.h, where CONSTANT is 0.
PRESETS = {
    "%tid.x": 1,
    "%ntid.x": 2,
    "%ctaid.x": 3,
    "%nctaid.x": 4,
    "%laneid": 5,
    "%warpid": 6,
    "%cluster_ctarank": 7,
    "%cluster_nctarank": 8,
}

BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4}
BYTES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}

#: 1.0 of 16 bits, alone and twice in a word: a number times it, plus another, is an addition.
ONES = {"bf16": 0x3F80, "bf16x2": 0x3F803F80, "f16": 0x3C00, "f16x2": 0x3C003C00}

#: Operands, of which those in braces or brackets have commas too; a label or a brace; and constants.
OPERANDS = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+")
BEGIN = re.compile(r"([\w$]+):|([{}])")
FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
WHOLE = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
ADDRESS = re.compile(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+))?\s*\]")


class RefusedError(Exception):
    """PTX that is not read here, or whose bits a GPU's assembler may choose."""


@dataclass
class Kernel:
    """A kernel, as the machine takes it."""

    name: str
    #: Bytes of shared memory that it declares, and of parameters.
    shared: int = 0
    parameters: int = 0
    #: Threads of a block at most; 0: not said.
    threads: int = 0
    registers: int = 0
    #: (register, preset, value)
    constants: list[tuple[int, int, int]] = field(default_factory=list)
    #: Those of its instructions.
    names: list[str] = field(default_factory=list)
    #: Of each instruction: the number of its name, a predicate or -1, whether that is negated, the number of operands,
    #: and these.
    code: array = field(default_factory=lambda: array("q"))


def aligned(offset, alignment):
    return -(-offset // alignment) * alignment


def split(text):
    """Operands, which commas separate; those in braces are one."""
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",")] if text else []
    return [part.strip() for part in OPERANDS.findall(text)]


#: How the operands of an instruction are read, by how its name begins; others are read one by one.
READ = {"bra": "branch", "ld.": "load", "ldmatrix.": "load", "st.": "store", "stmatrix.": "store"}
READ |= {"cp.async.c": "copy", "mma.": "several", "prefetch.": "address", "mov.": "move", "shfl.": "shuffle"}
READ |= {"setp.": "predicate"}


@functools.cache
def read_as(name):
    return next((how for begin, how in READ.items() if name.startswith(begin)), "")


FUSES = "fuses a multiplication with an addition"


@functools.cache
def refused(name):
    """Why an instruction is refused, if it is: it rounds elsewhere than the contract says, or leaves a choice."""
    operation, *suffixes = name.split(".")
    if not any(re.fullmatch(r"b?f\d+(x2)?", suffix) for suffix in suffixes):
        return ""
    if any(suffix in ("ftz", "approx", "full", "sat") for suffix in suffixes):
        return "is not exact"
    if operation in ("add", "sub", "mul", "div", "sqrt", "rcp") and "rn" not in suffixes:
        return "has no .rn: the assembler may fuse it with another"
    return FUSES if operation in ("fma", "mad") else ""


class Reader:
    """Reads one kernel."""

    def __init__(self, text, name):
        text = re.sub(r"/\*.*?\*/|//[^\n]*|\.(?:loc|file|pragma)[^\n]*", "", text, flags=re.DOTALL)
        text = text.split(".section")[0]  # debug information, to the end
        found = re.search(rf"\.entry\s+{name}\s*\(([^)]*)\)([^{{]*)\{{", text)
        if found is None or ".func" in text:
            raise RefusedError(f"no kernel {name}, or functions beside it")
        self.kernel = Kernel(name)
        self.numbers, self.symbols, self.labels, self.held = {}, {}, {}, {}
        self.defined = {}  # what registers hold that a constant was moved to
        self.read = {}  # the numbers of operands that were read
        self.parameters(found[1])
        threads = re.search(r"\.(?:max|req)ntid\s+(\d+)", found[2])
        self.kernel.threads = int(threads[1]) if threads else 0
        launch = re.findall(r"\.extern\s+\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[\]", text)
        statements = list(self.statements(text[found.end() : text.rindex("}")]))
        for alignment, symbol in launch:  # behind what the kernel declares, as the driver puts it
            self.kernel.shared = self.symbols[symbol] = aligned(self.kernel.shared, int(alignment))
        code = [self.instruction(statement) for statement in statements]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, *_ in code))}
        self.kernel.names = list(numbers)
        for name, predicate, negated, operands in code:
            found = [self.labels[operands[0]]] if name.startswith("bra") else operands
            self.kernel.code.extend((numbers[name], predicate, negated, len(found), *found))

    def parameters(self, text):
        offset = 0
        for parameter in filter(None, map(str.strip, text.split(","))):
            alignments = re.findall(r"(?<!ptr )\.align\s+(\d+)", re.sub(r"\.ptr[^,]*?\.align\s+\d+", "", parameter))
            size = BYTES[re.search(r"\.param[^.]*(?:\.align\s+\d+\s+)?\.(\w+)", parameter)[1]]
            name, count = re.search(r"([\w$]+)(?:\[(\d+)\])?$", parameter).groups()
            offset = aligned(offset, int(alignments[0]) if alignments else size)
            self.symbols[name] = offset
            offset += size * int(count or 1)
        self.kernel.parameters = offset

    def statements(self, body):
        """Instructions, with the registers of inner scopes renamed; declarations and labels are noted on the way."""
        scopes, count = [], 0
        for raw in body.split(";"):
            statement = " ".join(raw.split())
            while found := BEGIN.match(statement):
                if found[1]:
                    self.labels[found[1]] = count
                elif found[2] == "{":
                    scopes.append({})
                else:
                    scopes.pop()
                statement = statement[found.end() :].strip()
            if not statement:
                continue
            if statement.startswith(".reg"):
                for name in re.findall(r"[%\w$]+(?=[,\s]|$)", statement.split(None, 2)[2]):
                    if scopes:
                        scopes[-1][name] = f"{name}@{count}"
                continue
            if statement.startswith(".shared"):
                self.declare(statement)
                continue
            if statement.startswith("."):
                raise RefusedError(statement)
            for scope in scopes:
                for name, other in scope.items():
                    statement = re.sub(rf"(?<![\w%$@]){re.escape(name)}(?![\w$@])", other, statement)
            count += 1
            yield statement

    def declare(self, statement):
        alignment, kind, name, count = re.fullmatch(
            r"\.shared (?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d+)\])?", statement
        ).groups()
        self.symbols[name] = aligned(self.kernel.shared, int(alignment or BYTES[kind]))
        self.kernel.shared = self.symbols[name] + BYTES[kind] * int(count or 1)

    def register(self, name):
        if name not in self.numbers:
            self.numbers[name] = self.kernel.registers
            self.kernel.registers += 1
            if name in PRESETS:
                self.kernel.constants.append((self.numbers[name], PRESETS[name], 0))
        return self.numbers[name]

    def constant(self, value):
        if value not in self.held:
            self.held[value] = self.kernel.registers
            self.kernel.registers += 1
            self.kernel.constants.append((self.held[value], 0, value % 2**64))
        return self.held[value]

    def value(self, operand):
        """What an operand is if it is a constant, else None."""
        if operand.startswith("%"):
            return None
        if found := FLOAT.fullmatch(operand):
            return int(found[1] or found[2], 16)
        if WHOLE.fullmatch(operand):
            return int(operand.rstrip("U"), 0)
        return self.symbols.get(operand)

    def operand(self, text):
        """The number of a register, of a constant's too."""
        if text not in self.read:
            self.read[text] = self._operand(text)
        return self.read[text]

    def _operand(self, text):
        value = self.value(text)
        if value is not None:
            return self.constant(value)
        if not text.startswith("%") and "@" not in text:
            raise RefusedError(f"the operand {text}")
        if text.startswith(("%tid", "%ctaid", "%ntid", "%nctaid", "%cl")) and text not in PRESETS:
            raise RefusedError(f"the register {text}")
        return self.register(text)

    def address(self, text):
        """A register, and a number of bytes behind it."""
        base, offset = ADDRESS.fullmatch(text).groups()
        return [self.operand(base), int(offset or 0)]

    def several(self, text):
        parts = split(text.strip("{} ")) if text.startswith("{") else [text]
        return [-1 if part == "_" else self.operand(part) for part in parts]

    def instruction(self, statement):
        """Its name, a predicate or -1, whether that is negated, and its operands; of a branch its label."""
        predicate, negated = -1, False
        if statement[0] == "@":
            guard, _, statement = statement.partition(" ")
            negated, predicate = guard[1] == "!", self.register(guard.lstrip("@!"))
        name, _, rest = statement.partition(" ")
        name = name.replace(".shared::cta", ".shared")  # two names of a block's own
        operands = split(rest)
        self.refuse(name, operands)
        how = read_as(name)
        if how == "branch":
            numbers = [operands[0]]
        elif how == "load":
            numbers = [*self.address(operands[1]), *self.several(operands[0])]
        elif how == "store":
            numbers = [*self.address(operands[0]), *self.several(operands[1])]
        elif how == "copy" and len(operands) > 1:  # of bytes, of which some may be zeros
            more = operands[3] if len(operands) > 3 else operands[2]
            numbers = [*self.address(operands[0]), *self.address(operands[1]), *map(self.operand, (operands[2], more))]
        elif how == "several":
            numbers = [number for operand in operands for number in self.several(operand)]
        elif how == "address":
            numbers = self.address(operands[0])
        elif how == "move" and "{" in rest:
            taken = operands[0].startswith("{")
            parts, whole = self.several(operands[not taken]), self.operand(operands[taken])
            numbers = [8 * BYTES[name.removeprefix("mov.")] // len(parts), whole, *parts]
            name = "unpack" if taken else "pack"
        elif how == "shuffle":
            first, _, second = operands[0].partition("|")
            numbers = [self.operand(first), self.operand(second) if second else -1, *map(self.operand, operands[1:])]
        elif how == "predicate" and "|" in operands[0]:  # a predicate for each half
            numbers = [*map(self.operand, operands[0].split("|")), *map(self.operand, operands[1:])]
        else:
            if how == "move" and (value := self.value(operands[1])) is not None:
                self.defined[operands[0]] = value
            numbers = [self.operand(operand) for operand in operands]
        if name == "bar.sync" and (len(operands) != 1 or self.value(operands[0]) != 0):
            raise RefusedError(f"another barrier than the block's: {statement}")
        return name, predicate, negated, numbers

    def refuse(self, name, operands):
        """Refuses what rounds elsewhere than the contract says, or leaves the assembler a choice."""
        why = refused(name)
        if why == FUSES:
            one = ONES.get(name.rpartition(".")[2])
            if one is None or one not in (self.value(o) or self.defined.get(o) for o in operands[1:3]):
                raise RefusedError(f"{name} {why}: {', '.join(operands)}")
        elif why:
            raise RefusedError(f"{name} {why}")


def read(text, name):
    """The kernel of this name."""
    return Reader(text, name).kernel
