"""Every scenario drawn from a public bug report has a test that is named after it and says whence.

The scenarios are A01 to A37. A test of one is called ``test_aNN_...`` and stands in a file
``test_cases_*.py``; its docstring begins with the threads that reported the fault.
"""

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = {
    1: "sgl-project/sglang#6888",
    2: "sgl-project/sglang-jax#982 LMCache/LMCache#1365",
    3: "sgl-project/mini-sglang#142",
    4: "vllm-project/vllm#37152 GeeeekExplorer/nano-vllm#209",
    5: "sgl-project/sglang#10637",
    6: "GeeeekExplorer/nano-vllm#114 vllm-project/vllm#11186",
    7: "sgl-project/mini-sglang#52",
    8: "UbiquitousLearning/mllm#656 sgl-project/sglang#27147",
    9: "NVIDIA/Megatron-LM#5822",
    10: "sgl-project/sglang#32217",
    11: "vllm-project/vllm#35570 vllm-project/vllm#52530",
    12: "sgl-project/sglang#36926",
    13: "LMCache/LMCache#2158 LMCache/LMCache#1361",
    14: "sgl-project/sglang-jax#1147 sgl-project/sglang#31616",
    15: "huggingface/transformers#47433",
    16: "sgl-project/sglang#31486",
    17: "flashinfer-ai/flashinfer#941 Dao-AILab/flash-attention#2374",
    18: "NVIDIA/TensorRT-LLM#2699 vllm-project/vllm#3880",
    19: "vllm-project/vllm#1486 lightseekorg/tokenspeed#501",
    20: "vllm-project/vllm#43810",
    21: "GeeeekExplorer/nano-vllm#258",
    22: "pegainfer-project/pegainfer#291",
    23: "vllm-project/vllm#30931 ggml-org/llama.cpp#26207",
    24: "vllm-project/vllm#12621 vllm-project/vllm#15297",
    25: "LMCache/LMCache#3301 LMCache/LMCache#4086",
    26: "sgl-project/sglang#154",
    27: "sgl-project/sglang#14339 sgl-project/sglang#38454",
    28: "vllm-project/vllm#25780 vllm-project/vllm#25787",
    29: "sgl-project/sglang#7691",
    30: "NVIDIA/TensorRT-LLM#12188",
    31: "vllm-project/vllm#7283",
    32: "vllm-project/vllm#10583 vllm-project/vllm#15041",
    33: "pytorch/pytorch#9297 NVIDIA/TensorRT-LLM#18310",
    34: "sgl-project/sglang#12107",
    35: "zhaochenyang20/Awesome-ML-SYS-Tutorial#17 sgl-project/sglang#21379",
    36: "ggml-org/llama.cpp#3802",
    37: "flashinfer-ai/flashinfer#5176",
}
THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def cases_with_docstrings():
    """Number -> the docstring of each test of that scenario."""
    found = {number: [] for number in SOURCES}
    for path in sorted(HERE.glob("test_cases_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_a"):
                name = re.match(r"test_a(\d\d)_\w", node.name)
                if name:
                    found[int(name[1])].append(ast.get_docstring(node) or "")
    return found


FOUND = cases_with_docstrings()


def test_the_table_has_every_scenario():
    assert list(SOURCES) == list(range(1, 38)) == list(FOUND)


@pytest.mark.parametrize("number", SOURCES, ids="A{:02}".format)
def test_a_scenario_has_a_test_that_names_its_source(number):
    docstrings = FOUND[number]
    assert docstrings, f"no test_a{number:02}_... in tests/test_cases_*.py"
    named = [set(THREAD.findall(text)) for text in docstrings]
    assert all(named), f"a test of A{number:02} names no thread"
    assert set().union(*named) == set(SOURCES[number].split())
