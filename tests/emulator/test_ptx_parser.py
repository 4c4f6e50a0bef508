"""PTX text to instructions: operands, scopes, labels, line information."""

from __future__ import annotations

import pytest

from hopwell.emulator.ptx import SINK, Imm, Mem, Not, Pair, PtxError, Reg, Special, Sym, Vec, parse_module, type_size

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, params: str = "", head: str = ""):
    return parse_module(f"{HEAD}{head}.visible .entry k({params})\n{{\n{body}\nret;\n}}\n")["k"]


def test_registers_of_every_kind_are_numbered_per_kind():
    k = kernel(".reg .pred %p<2>; .reg .b16 %h<3>; .reg .f32 %f<4>; .reg .b64 %d; .reg .b128 %q<1>;\nmov.f32 %f2, %f3;")
    assert k.counts == {"p": 2, "h": 3, "r": 4, "d": 1, "q": 1}
    assert k.instrs[0].args == [Reg("r", 2, "%f2"), Reg("r", 3, "%f3")]


def test_operands():
    k = kernel(
        ".reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %d<2>;\n"
        "ld.global.v4.b32 {%r1, %r2, _, %r4}, [%d1+-16];\n"
        "shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;\n"
        "and.pred %p0, %p1, !%p0;\n"
        "mov.f32 %r1, 0f3F800000;\n"
        "mov.u32 %r1, %tid.x;\n"
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%r1], [%d0, {%r2, %r3}], [%r4+8];"
    )
    load, shuffle, logic, move, special, copy = k.instrs[:6]
    assert load.args[0] == Vec((Reg("r", 1, "%r1"), Reg("r", 2, "%r2"), SINK, Reg("r", 4, "%r4")))
    assert load.args[1].off == -16
    assert isinstance(shuffle.args[0], Pair)
    assert shuffle.args[4] == Imm(-1)
    assert logic.args[2] == Not(Reg("p", 0, "%p0"))
    assert move.args[1] == Imm(0x3F800000, "f32")
    assert special.args[1] == Special("tid.x")
    assert copy.args[1].coords == (Vec((Reg("r", 2, "%r2"), Reg("r", 3, "%r3"))),)
    assert copy.args[2] == Mem(Reg("r", 4, "%r4"), 8)


def test_scoped_registers_and_labels_do_not_clash():
    inner = "{ .reg .pred P; LOOP: setp.ne.b32 P, %r0, 0; @P bra LOOP; }"
    k = kernel(f".reg .b32 %r<1>;\n{inner}\n{inner}")
    branches = [i for i in k.instrs if i.op == "bra"]
    assert [b.target for b in branches] == [0, 2]
    assert branches[0].guard != branches[1].guard


def test_guards_and_lines():
    k = kernel(".reg .pred %p<1>; .reg .b32 %r<1>;\n\n@!%p0 mov.b32 %r0, 7;")
    i = k.instrs[0]
    assert i.guard_not
    assert i.guard == Reg("p", 0, "%p0")
    assert i.line == 8


def test_line_information_ends_with_its_line():
    text = (
        f'{HEAD}.file 1 "/src/kernel.py"\n.visible .entry k()\n'
        "{\n.reg .b32 %r<1>;\n.loc 1 42 7\nmov.b32 %r0, 1;\nret;\n}\n"
    )
    k = parse_module(text)["k"]
    assert k.instrs[0].loc == (1, 42)
    assert "/src/kernel.py:42" in k.where(0)


def test_parameters_and_shared_symbols():
    k = kernel(
        ".shared .align 16 .b8 buffer[48];\n.local .align 8 .b8 stack[24];\n.reg .b32 %r<1>;\nmov.b32 %r0, buffer;",
        ".param .u32 a, .param .align 64 .b8 map[128], .param .u64 .ptr .global c",
        ".extern .shared .align 1024 .b8 dyn[];\n.shared .align 8 .b8 fixed[10];\n",
    )
    assert [(p.name, p.offset, p.size) for p in k.params] == [("a", 0, 4), ("map", 64, 128), ("c", 192, 8)]
    assert k.shared == {"fixed": (0, 10), "buffer": (16, 48)}
    assert k.dynamic == {"dyn": 1024}
    assert k.local_bytes == 24
    assert k.instrs[0].args[1] == Sym("buffer")


def test_unresolved_label_is_an_error():
    with pytest.raises(PtxError, match="nowhere"):
        kernel("bra nowhere;")


@pytest.mark.parametrize(
    ("name", "size"), [("b8", 1), ("f16", 2), ("e4m3x2", 2), ("f16x2", 4), ("f32x2", 8), ("b128", 16)]
)
def test_type_sizes(name, size):
    assert type_size(name) == size
