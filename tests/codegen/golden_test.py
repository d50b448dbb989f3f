"""The generator's output for six rows that show nearly the whole vocabulary, compared as text.

golden/rows.toml holds the rows. After an intended change of a template run golden_test.py --update
and read the difference.
"""

import sys
import tomllib
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "codegen"))

import generate  # noqa: E402
import model  # noqa: E402


def outputs():
    types = model.load_types(ROOT / "codegen" / "spec" / "cuda" / "types.toml")
    rows = tomllib.loads((HERE / "golden" / "rows.toml").read_text())
    spec = model.load_rows([("golden", rows)], types)
    return generate.render_all(spec)


class Golden(unittest.TestCase):
    maxDiff = None

    def test_every_output_is_as_recorded(self):
        expected = {str(p.relative_to(HERE / "golden")): p.read_text()
                    for p in (HERE / "golden").rglob("*.gen.*")}
        actual = outputs()
        self.assertEqual(sorted(actual), sorted(expected))
        for name, text in actual.items():
            with self.subTest(name):
                self.assertEqual(text, expected[name])


if __name__ == "__main__":
    if "--update" in sys.argv:
        for name, text in outputs().items():
            generate.write_if_changed(HERE / "golden" / name, text)
    else:
        unittest.main()
