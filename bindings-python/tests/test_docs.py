"""What the documentation shows is run."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_examples_of_a_page_run(page):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    # Those of the gateways run beside the gateways, see tests/gateways.
    examples = [example for example in examples if not re.search(r"kvlane\.(asgi|litellm|ray)\b", example)]
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})


def test_the_typed_example_runs():
    runpy.run_path(str(Path(__file__).with_name("typed_example.py")), run_name="__main__")


def test_every_name_of_the_module_is_public_and_typed():
    import kvlane

    stub = Path(kvlane.__file__).with_name("_native.pyi").read_text()
    assert Path(kvlane.__file__).with_name("py.typed").exists()
    for name in kvlane.__all__:
        assert hasattr(kvlane, name)
        assert f'"{name}"' in stub
