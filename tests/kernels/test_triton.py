"""The Triton kernels on the CPU, by Triton's interpreter in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import thorough_but

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """How far each kernel is from its plain twin: root mean square over that of the twin."""
    found: dict[str, float] = _told_by("interpreted.py", TRITON_INTERPRET="1")
    return found


def _told_by(script: str, *words: str, **environ: str) -> Any:
    command = [sys.executable, Path(__file__).parent / script, *words]
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, check=False
    )
    # Triton 3.6's interpreter counts a loop by what NumPy 2.5 does not do any more.
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("this version of Triton cannot interpret loops with this version of NumPy")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _of(interpreted: dict[str, float], name: str) -> dict[str, float]:
    chosen = {key: value for key, value in interpreted.items() if key.startswith(name)}
    assert chosen, f"no case called {name}"
    return chosen


@pytest.mark.parametrize("form", ["dense", "fp8", "nf4"])
def test_few_rows_read_every_format_as_their_plain_twin_does(
    interpreted: dict[str, float], form: str
) -> None:
    apart = _of(interpreted, f"decode {form}")
    assert len(apart) == 2
    assert max(apart.values()) < 2e-6


def test_few_rows_are_added_to_what_is_there(interpreted: dict[str, float]) -> None:
    assert interpreted["onto"] < 2e-6


def test_few_rows_in_bfloat16(interpreted: dict[str, float]) -> None:
    # The twin rounds to bfloat16 between its products, the kernel does not.
    assert _of(interpreted, "decode bfloat16")["decode bfloat16"] < 1e-2


def test_many_rows_with_fused_parts(interpreted: dict[str, float]) -> None:
    assert _of(interpreted, "routed")["routed"] < 1e-6


def test_all_tokens_to_the_same_experts(interpreted: dict[str, float]) -> None:
    assert interpreted["routed alike"] < 1e-6
    assert interpreted["decode alike"] < 2e-6


def test_the_parts_around_the_products(interpreted: dict[str, float]) -> None:
    for name in ("swiglu", "gather_sum", "norm_rotate"):
        assert max(_of(interpreted, f"{name} torch.float32").values()) < 1e-6
        assert max(_of(interpreted, f"{name} torch.bfloat16").values()) < 1e-2


def test_rows_are_rounded_to_e4m3(interpreted: dict[str, float]) -> None:
    """The interpreter does not round to the nearest e4m3 as a GPU does: one step is 1/8 at most."""
    for name in ("to_fp8", "swiglu_to_fp8"):
        assert max(_of(interpreted, name).values()) < 0.1
    assert max(_of(interpreted, "scale").values()) < 1e-6


def test_attention_by_pages(interpreted: dict[str, float]) -> None:
    """Rows of every length, in memory that holds no numbers behind them; NaN would spread."""
    apart = _of(interpreted, "by pages")
    assert apart.pop("by pages float16") < 1e-3
    assert len(apart) == 3
    assert max(apart.values()) < 1e-6


def test_attention_by_pages_writes_one_slot_a_row(interpreted: dict[str, float]) -> None:
    """The memory is that of the twin, to the bit, and slots behind the new token stay unwritten."""
    assert set(_of(interpreted, "memory").values()) == {0.0}
    assert set(_of(interpreted, "unwritten").values()) == {0.0}


def test_attention_by_pages_gives_a_row_its_bits_in_any_company(
    interpreted: dict[str, float],
) -> None:
    assert interpreted["alone"] == 0.0


def test_decode_steps_of_a_network_by_pages_alone(interpreted: dict[str, float]) -> None:
    assert interpreted["network by pages"] < 1e-5


def test_norms_and_heads_round_as_their_plain_twin_does(interpreted: dict[str, float]) -> None:
    """In half precision one step at most, where the order of a sum tips a rounding; nearly all are
    the same. (The interpreter cuts off what a GPU rounds to bfloat16.)
    """
    assert max(_of(interpreted, "ulps torch.float16").values()) <= 1
    assert max(_of(interpreted, "unequal torch.float16").values()) < 0.001
    assert max(_of(interpreted, "ulps torch.float32").values()) <= 8


def test_the_router_chooses_what_its_plain_twin_chooses(interpreted: dict[str, float]) -> None:
    assert len(_of(interpreted, "choices")) == 6
    assert set(_of(interpreted, "choices").values()) == {0.0}
    # Few rows and many; parts of float16 leave out more of a weight than those of bfloat16.
    assert max(_of(interpreted, "logits").values()) < 1e-6
    assert max(_of(interpreted, "weights torch.float32").values()) < 1e-6
    assert max(_of(interpreted, "weights torch.float16").values()) < 1e-3
    assert interpreted["outside"] == 0.0, "rows that are no numbers choose experts all the same"


def test_a_row_has_its_bits_in_any_company(interpreted: dict[str, float]) -> None:
    assert len(_of(interpreted, "company")) == 6
    assert set(_of(interpreted, "company").values()) == {0.0}


def test_routes_by_counting_are_those_of_a_stable_sort(interpreted: dict[str, float]) -> None:
    assert len(_of(interpreted, "routes")) == 8
    assert set(_of(interpreted, "routes").values()) == {0.0}


def test_a_network_of_fused_rows(interpreted: dict[str, float]) -> None:
    assert interpreted["network of fused rows"] < 1e-5


@pytest.fixture(
    scope="module",
    # 8.9 has only the kernels that read FP8.
    params=thorough_but(["89"], ["80", "89", "90", "100", "120"]),
)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, int]]:
    """What each kernel takes as machine code, at the released shapes; how fast no CPU can say."""
    cache = str(tmp_path_factory.mktemp("cache"))
    found: dict[str, dict[str, int]] = _told_by(
        "compiled.py", request.param, TRITON_CACHE_DIR=cache
    )
    assert len(found) == {"80": 19, "89": 4}.get(request.param, 23)
    return found


def test_kernels_keep_their_numbers_in_registers(compiled: dict[str, dict[str, int]]) -> None:
    spilled = {name: took["stack"] for name, took in compiled.items() if took["stack"]}
    assert not spilled
    # Two programs at least fit a multiprocessor: one works while another waits for memory.
    for name, took in compiled.items():
        assert 2 * 32 * took["warps"] * took["registers"] <= 65_536, name


def test_kernels_fit_into_a_multiprocessors_shared_memory(
    compiled: dict[str, dict[str, int]],
) -> None:
    """In KiB: 227 on 9.0 and 10.0; code for 8.0 runs on 8.6 and 8.9 as well, which have 99."""
    for name, took in compiled.items():
        most = 227 if name.endswith((" 90", " 100")) else 99
        assert took["shared"] <= most * 1024, name


@pytest.mark.parametrize(
    "kernel",
    [
        *("hidden 0", "hidden 1", "mixed 0", "mixed 1", "logits", "routed", "partial", "heads"),
        "norm_rotate",
        *("norm False", "norm True", "swiglu", "gather_sum", "quantize False", "quantize True"),
    ],
)
@pytest.mark.thorough
@pytest.mark.parametrize("compiled", ["90"], indirect=True)
def test_kernels_read_sixteen_bytes_a_thread(
    compiled: dict[str, dict[str, int]], kernel: str
) -> None:
    assert compiled[f"{kernel} 90"]["vectors"]
