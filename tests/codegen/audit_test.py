"""The audit finds what it claims to find: each test spoils one fact of the real spec."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "codegen"))

import audit  # noqa: E402
import model  # noqa: E402

INCLUDE = sys.argv.pop(1)
UNIT = audit.parse(INCLUDE)
FUNCTIONS = audit.declarations(UNIT.cursor, audit.CursorKind.FUNCTION_DECL, {})
VERSIONS = audit.typedef_versions(INCLUDE)


class Audit(unittest.TestCase):
    def setUp(self):
        self.spec = model.load(ROOT / "codegen" / "spec" / "cuda")

    def assert_fault(self, faults, text):
        self.assertTrue(any(text in f for f in faults), list(faults))

    def test_a_missing_row(self):
        self.spec.functions = [f for f in self.spec.functions if f.symbol != "cuMemFree_v2"]
        self.assert_fault(list(audit.check_prototypes(self.spec, FUNCTIONS)),
                          "cuMemFree_v2 has no row")

    def test_a_changed_parameter_type_and_name(self):
        self.spec.by_symbol["cuMemAlloc_v2"].args[1].c_type = "int"
        self.spec.by_symbol["cuMemFree_v2"].args[0].name = "pointer"
        faults = list(audit.check_prototypes(self.spec, FUNCTIONS))
        self.assertEqual(len(faults), 2)
        self.assert_fault(faults, "The prototype of cuMemAlloc_v2 differs")
        self.assert_fault(faults, "The prototype of cuMemFree_v2 differs")

    def test_a_forgotten_twin(self):
        self.spec.by_symbol["cuLaunchKernel"].per_thread = ""
        self.assert_fault(list(audit.check_prototypes(self.spec, FUNCTIONS)), "hides its per-thread")

    def test_a_wrong_version(self):
        self.assertEqual(list(audit.check_versions(self.spec, VERSIONS)), [])
        self.spec.by_symbol["cuMemAlloc_v2"].version = 3010
        self.assert_fault(list(audit.check_versions(self.spec, VERSIONS)),
                          "The versions of cuMemAlloc")

    def test_a_struct_with_pointers_or_of_another_size(self):
        self.spec.types.structs["CUlaunchConfig"] = 56
        self.spec.types.structs["CUuuid"] = 8
        faults = list(audit.check_types(self.spec, UNIT))
        self.assertEqual(len(faults), 2)
        self.assert_fault(faults, "CUlaunchConfig holds a pointer")
        self.assert_fault(faults, "CUuuid has 16 bytes; types.toml locks 8")

    def test_a_number_of_another_size(self):
        self.spec.types.scalars["cuuint64_t"] = "u32"
        self.assert_fault(list(audit.check_types(self.spec, UNIT)), "has 8 bytes, not u32")

    def test_a_path_sent_as_a_string(self):
        row = {"id": 1, "proto": "CUresult(CUmodule* module, const char* fname)", "mode": "call",
               "version": 2000, "custom": ["client", "server"],
               "arg": {"module": "new", "fname": "string"}}
        spec = model.load_rows([("module", {"cuModuleLoad": row})], self.spec.types)
        self.assert_fault(list(audit.check_marks(spec)), "looks like a path")

    def test_an_unmarked_descriptor(self):
        row = {"id": 1, "proto": "CUresult(int fd)", "mode": "call", "version": 2000}
        spec = model.load_rows([("external", {"cuX": row})], self.spec.types)
        self.assert_fault(list(audit.check_marks(spec)), "The descriptor fd of cuX is not marked")

    def test_an_export_that_the_stub_lacks_and_one_that_it_has(self):
        names = {f.symbol for f in self.spec.functions} | {f.twin for f in self.spec.functions
                                                           if f.twin}
        faults = list(audit.check_stub(self.spec, names - {"cuInit"} | {"cuNew"}))
        self.assertEqual(len(faults), 2)
        self.assert_fault(faults, "The spec exports cuInit")
        self.assert_fault(faults, "exports cuNew")


if __name__ == "__main__":
    unittest.main()
