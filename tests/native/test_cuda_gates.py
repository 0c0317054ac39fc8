"""``cuda_gates.py``: loops in machine code, limits, and the quick kernels on one architecture."""

from dataclasses import replace

import cuda_build
import cuda_gates
import cuda_sass
import pytest
from cuda_gates import Limit, Row
from needs import lacks, patched_upstream

ROW = Row("attend<shape<128, false>, true>", 86, 168, 0, 0, 0, 580.0, None, None)
# a loop of 16 x 64 x 128 products with a rare block that is left out, and one that lies after the loop and comes back
LISTING = """
	.section	.text._Z6attendv,"ax",@progbits
.text._Z6attendv:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   FMUL R0, R0, R1 ;
        /*0030*/                   FMUL R2, R2, R1 ;
.L_x_1:
{products}
        /*0400*/               @P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0410*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0420*/                   BRA.U UP0, `(.L_x_0) ;
        /*0430*/                   EXIT ;
.L_x_3:
        /*0440*/                   FADD R4, R4, R5 ;
        /*0450*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*0460*/                   BRA `(.L_x_4) ;
"""
PRODUCT = "        /*0100*/                   HMMA.16816.F32 R4, R8, R12, R4 ;"


def code(n: int) -> cuda_sass.Code:
    (found,) = cuda_sass.parse(LISTING.format(products="\n".join([PRODUCT] * n)))
    return found


# ---- machine code ----


def test_a_loop_is_found_with_what_lies_after_it():
    loops = code(64).loops
    assert len(loops) == 1  # the one that nothing reaches is not one
    assert loops[0].total(cuda_sass.products) == 64 * 16 * 8 * 16
    assert loops[0].total(lambda instruction: instruction.startswith("FADD")) == 1


def test_a_call_that_does_not_come_back_is_a_branch():
    listing = LISTING.replace("@P2 BRA", "@P2 CALL.REL.NOINC")
    (found,) = cuda_sass.parse(listing.format(products=PRODUCT))
    assert found.loops[0].total(lambda instruction: instruction.startswith("FADD")) == 1


def test_only_rows_that_are_not_packed_of_floats_are_unpacked():
    octets = "        /*0100*/                   STS.128 [R4], R8 ;"
    packed = "        /*0110*/                   F2FP.F16.F32.PACK_AB R8, R9, R8 ;"
    quantized, floats = (
        next(cuda_sass.parse(LISTING.format(products=products))) for products in (octets, f"{octets}\n{packed}")
    )
    assert cuda_gates.loops(quantized)["unpack"] == 5.0
    assert cuda_gates.loops(floats)["unpack"] is None


def test_the_shortest_way_is_counted():
    (loop,) = code(64).loops_with(cuda_sass.products)
    assert loop.executed(cuda_sass.products) == (64 * 2048, 1 + 64 + 1 + 2)
    assert cuda_gates.loops(code(64)) == {"dense": None, "scores": 68.0, "unpack": None}


def test_fillers_between_products_are_not_counted():
    filler = "        /*0108*/                   NOP ;"
    (found,) = cuda_sass.parse(LISTING.format(products="\n".join([PRODUCT, filler] * 4)))
    assert found.loops[0].executed(cuda_sass.products) == (4 * 2048, 1 + 4 + 1 + 2)


def test_values_that_are_multiplied_again_are_not_counted():
    transposed = "        /*0104*/                   LDSM.16.MT88.4 R8, [R4] ;"
    finite = "        /*0108*/              @!P1 BRA `(.L_x_2) ;"
    values = [transposed, *[PRODUCT.replace("F32", "F16")] * 32, finite, transposed, PRODUCT]
    (found,) = cuda_sass.parse(LISTING.format(products="\n".join([PRODUCT] * 32 + values)))
    assert found.loops[0].executed(cuda_sass.products) == (64 * 2048, 1 + 32 + 1 + 32 + 1 + 2)


@pytest.mark.parametrize(("instruction", "n"), [
    ("HMMA.16816.F32 R4", 2048), ("HMMA.1688.F32 R4", 1024), ("IMMA.16832.S8.S8 R4", 4096),
    ("HGMMA.64x128x16.F32 R24", 32768), ("FFMA R1, R2, R3, R4", 0), ("HMMA.SP R4", 0),
])  # fmt: skip
def test_products_are_multiplications_of_a_warp(instruction, n):
    assert cuda_sass.products(instruction) == n


def test_what_ptxas_says_is_read():
    said = """ptxas info    : Compiling entry function '_Z4copyv' for 'sm_90a'
ptxas info    : Function properties for _Z4copyv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 1.0 ms
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_86'
ptxas info    : Function properties for _Z5otherv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert cuda_build.kernels_of(said) == [
        cuda_build.Kernel("_Z4copyv", 90, 8, 16, 40, 1024), cuda_build.Kernel("_Z5otherv", 86, 0, 0, 8, 0)
    ]  # fmt: skip


# ---- limits ----


@pytest.mark.parametrize(("row", "verdict"), [
    (ROW, []), (replace(ROW, dense=581.0), ["aim missed"]), (replace(ROW, dense=601.0), ["failed"]),
    (replace(ROW, spilled=4), ["failed"]), (replace(ROW, kernel="other", dense=None), ["failed"]),
])  # fmt: skip
def test_a_limit_fails_and_an_aim_is_listed(row, verdict):
    limits = [Limit("attend<*", "dense", 600, aim=580)]
    assert [kind for kind, _ in cuda_gates.verdicts([row], limits)] == verdict


def test_a_kernel_with_a_limit_of_its_own_may_spill_as_much():
    limits = [Limit("attend<*", "spilled", 8)]
    assert list(cuda_gates.verdicts([replace(ROW, spilled=8)], limits)) == []
    assert [kind for kind, _ in cuda_gates.verdicts([replace(ROW, spilled=12)], limits)] == ["failed"]


def test_every_limit_has_a_column():
    assert {limit.what for limit in cuda_gates.LIMITS} <= set(cuda_gates.COLUMNS)
    assert all(limit.aim is None or limit.aim <= limit.most for limit in cuda_gates.LIMITS)


def test_a_source_without_kernels_is_refused(capsys):
    with pytest.raises(SystemExit):
        cuda_gates.main(["arena.cu"])
    assert "no kernels in arena.cu; there are angles.cu" in capsys.readouterr().err


# ---- kernels ----


@pytest.mark.parametrize("source", ["index.cu"])
def test_quick_kernels_keep_to_their_limits(source):
    """All others and other architectures are up to the command: they take minutes."""
    nvcc, nvdisasm = (cuda_build.tool(name) for name in ("nvcc", "nvdisasm"))
    if not nvcc or not nvdisasm:
        lacks("cuda", "nvcc and nvdisasm are not both installed (nvidia-cuda-nvdisasm)")
    rows = cuda_gates.rows_of(source, 86, nvcc, nvdisasm, patched_upstream())
    assert rows
    limits = [one for one in cuda_gates.LIMITS if any(cuda_gates.matches(row, one) for row in rows)]
    assert [why for verdict, why in cuda_gates.verdicts(rows, limits) if verdict == "failed"] == []
