"""What the loader of the spec refuses, one contradiction per test, and how wire.lock guards ids."""

import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "codegen"))

import generate  # noqa: E402
import model  # noqa: E402

TYPES = model.load_types(ROOT / "codegen" / "spec" / "cuda" / "types.toml")
MEMSET = {"id": 0x0C13, "proto": "CUresult(CUdeviceptr dst, unsigned char uc, size_t N)",
          "mode": "post", "version": 3020, "blocks": "window",
          "arg": {"dst": "device writes N"}}
COUNT = {"id": 0x0501, "proto": "CUresult(unsigned int* count, CUmodule mod)", "mode": "call",
         "version": 12040, "arg": {"count": "out"}}


def load(**rows):
    return model.load_rows([("group", rows)], TYPES)


class Refusals(unittest.TestCase):
    def refuses(self, sentence, **rows):
        with self.assertRaises(model.SpecError) as caught:
            load(**rows)
        self.assertIn(sentence, str(caught.exception))

    def test_the_base_rows_are_accepted(self):
        spec = load(cuA=MEMSET, cuB=COUNT)
        self.assertEqual([f.symbol for f in spec.functions], ["cuB", "cuA"])

    def test_a_posted_row_with_an_output(self):
        self.refuses("cuA: A posted row cannot have an output (count).",
                     cuA=COUNT | {"mode": "post", "blocks": "no"})

    def test_a_posted_row_that_does_not_say_what_blocks(self):
        row = dict(MEMSET)
        del row["blocks"]
        self.refuses("must say what blocks", cuA=row)

    def test_a_posted_row_that_waits(self):
        self.refuses("cannot block (pending)", cuA=MEMSET | {"blocks": "pending"})

    def test_a_count_that_names_no_argument(self):
        proto = "CUresult(unsigned int* counts, unsigned int n)"
        self.refuses("The annotation of counts names no argument (m).",
                     cuA=COUNT | {"proto": proto, "arg": {"counts": "out, count m"}})

    def test_a_length_that_names_no_argument(self):
        self.refuses("The annotation of dst names no argument (M).",
                     cuA=MEMSET | {"arg": {"dst": "device writes M*4"}})

    def test_a_length_that_is_code(self):
        self.refuses("uses more than", cuA=MEMSET | {"arg": {"dst": "device writes N-1"}})
        self.refuses("uses more than", cuA=MEMSET | {"arg": {"dst": "device writes f(N)"}})

    def test_a_struct_with_pointers_copied_as_bytes(self):
        self.refuses("would copy CUlaunchConfig as bytes",
                     cuA=COUNT | {"proto": "CUresult(const CUlaunchConfig* config)",
                                  "arg": {"config": "in"}})

    def test_a_device_pointer_without_annotation(self):
        self.refuses("The argument (dst, CUdeviceptr) needs an annotation.",
                     cuA=MEMSET | {"arg": {}})

    def test_a_pointer_or_string_without_annotation(self):
        self.refuses("needs an annotation", cuA=COUNT | {"arg": {}})
        self.refuses("needs an annotation",
                     cuA=COUNT | {"proto": "CUresult(const char* name)", "arg": {}})

    def test_an_output_that_is_const_or_no_pointer(self):
        for proto in ("CUresult(const unsigned int* count)", "CUresult(unsigned int count)"):
            self.refuses("cannot be an output", cuA=COUNT | {"proto": proto})

    def test_a_new_handle_of_no_handle_type(self):
        self.refuses("points to no handle",
                     cuA=COUNT | {"arg": {"count": "new"}, "custom": ["client", "server"]})

    def test_a_new_handle_without_a_hand_written_client(self):
        row = {"id": 1, "proto": "CUresult(CUevent* e)", "mode": "post", "version": 2000,
               "blocks": "no", "arg": {"e": "new"}}
        self.refuses("needs a hand-written client half", cuA=row)
        self.refuses("needs a hand-written server half",
                     cuA=row | {"proto": "CUresult(CUcontext* e)", "custom": ["client"]})

    def test_a_duplicate_id(self):
        self.refuses("The id (0x0501) is already that of cuA.", cuA=COUNT, cuB=COUNT)

    def test_an_id_of_the_operations(self):
        self.refuses("belongs to the operations", cuA=COUNT | {"id": 0x8000})

    def test_an_annotation_of_no_argument(self):
        self.refuses("annotates an argument (x)", cuA=COUNT | {"arg": {"count": "out", "x": "in"}})

    def test_an_unknown_phrase_or_key(self):
        self.refuses("unknown phrase (maybe)", cuA=COUNT | {"arg": {"count": "out, maybe"}})
        self.refuses("unknown keys (colour)", cuA=COUNT | {"colour": "red"})

    def test_two_roles(self):
        self.refuses("two roles", cuA=COUNT | {"arg": {"count": "out, in"}})

    def test_unsupported_without_reason_and_reason_without_unsupported(self):
        proto = {"id": 1, "proto": "CUresult()", "version": 2000}
        self.refuses("A reason belongs", cuA=proto | {"mode": "unsupported"})
        self.refuses("A reason belongs", cuA=proto | {"mode": "local", "reason": "no"})

    def test_references_to_rows_that_cannot_serve(self):
        alias = {k: COUNT[k] for k in ("id", "proto", "mode", "version")} | {"same_as": "cuB"}
        self.refuses("does not exist", cuA=alias)
        other = {"id": 2, "proto": "CUresult(CUevent e)", "mode": "call", "version": 2000}
        self.refuses("has another prototype", cuA=alias, cuB=other)
        local = {"id": 2, "proto": "CUresult(CUevent e)", "mode": "local", "version": 2000}
        self.refuses("has no command", cuA=COUNT | {"via": ["cuB"], "custom": ["client"]},
                     cuB=local)

    def test_a_row_that_sends_another_with_more_than_defaults(self):
        wait = {"id": 1, "proto": "CUresult(CUstream s, CUevent e, unsigned int f)", "mode": "post",
                "version": 2000, "blocks": "no"}
        load(cuA=wait, cuB={"id": 2, "proto": "CUresult(CUevent e)", "mode": "post",
                            "version": 2000, "sends": "cuA"})
        self.refuses("lacks an argument (e)", cuA=wait,
                     cuB={"id": 2, "proto": "CUresult(CUstream s)", "mode": "post",
                          "version": 2000, "sends": "cuA"})
        self.refuses("has another type", cuA=wait,
                     cuB={"id": 2, "proto": "CUresult(CUstream e)", "mode": "post",
                          "version": 2000, "sends": "cuA"})

    def test_an_own_layout_without_a_hand_written_client(self):
        self.refuses("needs both halves hand-written", cuA=COUNT | {"wire": {"x": "u32"}})

    def test_a_wire_field_of_unknown_type(self):
        self.refuses("unknown type (u24)", cuA=COUNT | {"wire": {"x": "u24"}, "custom": ["client", "server"]})


class Names(unittest.TestCase):
    def test_the_oldest_served_generation_has_the_plain_name(self):
        old = {"id": 1, "proto": "CUresult(CUevent e)", "mode": "unsupported", "version": 2000,
               "reason": "old"}
        new = {"id": 2, "proto": "CUresult(CUevent e)", "mode": "call", "version": 3020}
        newest = new | {"id": 3, "version": 12000}
        spec = load(cuX=old, cuX_v2=new, cuX_v3=newest)
        self.assertEqual([f.cpp for f in spec.functions], ["CuX_v1", "CuX", "CuX_v3"])

    def test_an_older_name_shares_the_body(self):
        new = {"id": 2, "proto": "CUresult(void** p, size_t n)", "mode": "local", "version": 3020}
        old = {"id": 1, "proto": "CUresult(void** p, unsigned int n)", "mode": "local",
               "version": 2000, "same_as": "cuX_v2"}
        spec = load(cuX=old, cuX_v2=new)
        self.assertEqual([(f.cpp, f.main) for f in spec.functions],
                         [("CuX_v1", False), ("CuX", True)])


class Layouts(unittest.TestCase):
    def test_the_largest_fields_come_first_and_padding_is_explicit(self):
        command = load(cuA=MEMSET).functions[0].command
        self.assertEqual(command.describe(),
                         "0 dst address 8; 8 N u64 8; 16 uc u8 1; 17 padding0 pad[7] 7; size 24")

    def test_outputs_are_in_the_reply_and_inouts_in_both(self):
        row = {"id": 1, "proto": "CUresult(size_t* n, unsigned int* f, float* p)", "mode": "call",
               "version": 2000, "arg": {"n": "inout", "f": "out", "p": "out, nullable"}}
        function = load(cuA=row).functions[0]
        self.assertEqual(function.command.describe(), "0 n u64 8; size 8")
        self.assertEqual(function.reply.describe(), "0 n u64 8; 8 f u32 4; 12 p f32 4; size 16")

    def test_strings_travel_as_a_length_and_a_tail(self):
        row = {"id": 1, "proto": "CUresult(CUmodule m, const char* name)", "mode": "call",
               "version": 2000, "arg": {"name": "string"}}
        function = load(cuA=row).functions[0]
        self.assertEqual([f.name for f in function.command.tails], ["name_bytes"])
        self.assertEqual(function.command.size, 16)


class WireLock(unittest.TestCase):
    def setUp(self):
        self.lock = generate.lock_lines(load(cuA=MEMSET, cuB=COUNT))

    def test_the_same_spec_has_no_faults(self):
        self.assertEqual(generate.lock_faults(load(cuA=MEMSET, cuB=COUNT), self.lock), [])

    def test_a_new_row_is_no_fault_but_has_to_be_locked(self):
        spec = load(cuA=MEMSET, cuB=COUNT, cuC=COUNT | {"id": 0x0502})
        self.assertEqual(generate.lock_faults(spec, self.lock), [])
        self.assertEqual(generate.unlocked(spec, self.lock), ["cuC"])

    def test_a_changed_layout_under_the_same_id(self):
        wider = MEMSET | {"proto": "CUresult(CUdeviceptr dst, unsigned short uc, size_t N)"}
        faults = generate.lock_faults(load(cuA=wider, cuB=COUNT), self.lock)
        self.assertEqual(faults, ["The wire layout of cuA changed under the same id (0x0c13); give "
                                  "it a new one."])

    def test_a_changed_reply_under_the_same_id(self):
        wider = COUNT | {"proto": "CUresult(size_t* count, CUmodule mod)"}
        self.assertEqual(len(generate.lock_faults(load(cuA=MEMSET, cuB=wider), self.lock)), 1)

    def test_a_removed_and_a_reused_id(self):
        self.assertIn("is gone", generate.lock_faults(load(cuA=MEMSET), self.lock)[0])
        self.assertIn("is now that of cuC",
                      generate.lock_faults(load(cuA=MEMSET, cuC=COUNT), self.lock)[0])

    def test_an_unsupported_row_may_gain_a_layout(self):
        row = {k: COUNT[k] for k in ("id", "proto", "version")}
        lock = generate.lock_lines(load(cuB=row | {"mode": "unsupported", "reason": "not yet"}))
        self.assertEqual(generate.lock_faults(load(cuB=COUNT), lock), [])


if __name__ == "__main__":
    unittest.main()
