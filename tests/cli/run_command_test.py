#!/usr/bin/env python3
"""run_command_test.py TENON: tests `tenon run` with random and given tensors, its check and
files.
"""
import json
import math
import os
import struct
import subprocess
import unittest

from command import TENON, CommandTest, safetensors, strict_json

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4}
RESIDUAL = "make_extra_output>r layernorm linear(96,64) bias silu linear(64,96) bias add<r"
CHAINS = [
    ("gelu", 7, 33), ("bias swiglu scale(0.5)", 9, 66), ("bias dropout(0.1) add", 33, 64),
    ("dropout(0.5) gelu dropout(0.25)", 5, 64), ("rmsnorm(65) relu", 33, 65),
    ("layernorm(513)", 3, 513), ("l2norm", 17, 31),
    ("layernorm(64,zero_centered_gamma=true,eps=0.1)", 3, 64),
    ("make_extra_output>r gelu add<r silu add<r scale(0.3) add<r", 40, 70),
    ("make_extra_output gelu make_extra_output", 8, 24), ("reshape(16) gelu reshape(64)", 6, 32),
    ('act("x*x/(1+x*x)") scale(-2) identity', 6, 32), ('act("scaled(swiglu)")', 6, 32),
    ("all_reduce gelu all_gather reduce_scatter", 4, 8),
    ('swiglu(layout=swapped) clamped_swiglu(layout="interleaved(4)",limit=2)', 5, 64),
    ("elu(alpha=0.5) leaky_relu(slope=0.2) hardswish", 5, 64), ("linear(7,1) gelu", 3, 7),
]
PRODUCTS = [
    (RESIDUAL, 50, 96), ("linear(64,256) bias swiglu linear(128,64) bias dropout(0.1) add", 65, 64),
    ("linear(32,48) reshape(24) gelu reshape(96) linear(96,8)", 10, 32),
    ("quantize linear(64,64) quantize gelu", 33, 64),
]


def read_safetensors(path):
    """Reads a file: name -> (dtype, shape, values)."""
    with open(path, "rb") as f:
        data = f.read()
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + length]), data[8 + length:]
    tensors, at = {}, 0
    for name, t in header.items():
        begin, end = t["data_offsets"]
        assert begin == at and end - begin == math.prod(t["shape"]) * SIZES[t["dtype"]]
        at, raw = end, body[begin:end]
        if t["dtype"] == "BF16":
            codes = struct.unpack(f"<{len(raw) // 2}H", raw)
            values = [struct.unpack("<f", struct.pack("<I", c << 16))[0] for c in codes]
        else:
            code = {"F32": "f", "F16": "e"}[t["dtype"]]
            values = list(struct.unpack(f"<{len(raw) // SIZES[t['dtype']]}{code}", raw))
        tensors[name] = (t["dtype"], t["shape"], values)
    assert at == len(body)
    return tensors


def write_safetensors(path, tensors):
    """Writes a file from name -> (dtype, shape, values)."""
    codes = {"F32": "f", "F16": "e", "F64": "d", "I32": "i"}
    with open(path, "wb") as f:
        f.write(safetensors({
            name: (dtype, shape, struct.pack(f"<{len(values)}{codes[dtype]}", *values))
            for name, (dtype, shape, values) in tensors.items()}))


class RunCommand(CommandTest):
    NAME = ("run",)

    def run_it(self, *args, code=0, repeat="0"):
        return super().run_it(*args, "--repeat", repeat, code=code)

    def json(self, *args, code=0, repeat="0"):
        out, _ = self.run_it(*args, "--json", code=code, repeat=repeat)
        self.assertEqual(out.count("\n"), 1)
        return strict_json(out)

    def checked(self, chain, rows, cols, dtype, recipe, *more):
        what = (chain, rows, cols, dtype, recipe, *more)
        got = self.json(chain, "--rows", str(rows), "--cols", str(cols), "--dtype", dtype,
                        "--recipe", recipe, "--backward", *more)
        self.assertEqual((got["rows"], got["cols"], got["check"]["rows"]), (rows, cols, rows), what)
        names = [t["name"] for t in got["check"]["tensors"]]
        self.assertEqual(len(names), len(set(names)), what)
        self.assertTrue({"y", "dx"} <= set(names), what)
        reads = {n for n in got["from"] if not n.startswith("d")} - {"x"}
        self.assertEqual({n[1:] for n in names if n.startswith("d")} - {"x"}, reads, what)
        self.assertEqual(got["check"]["left_out"], [], what)
        # The tolerance must not be too large: at most a few units of the format per op.
        unit = {"f32": 2**-22, "f16": 2**-10, "bf16": 2**-7}[dtype]
        unit = unit if recipe == "none" and "fp8" not in more else 2**-2
        for t in got["check"]["tensors"]:
            self.assertTrue(t["ok"], (what, t))
            self.assertLessEqual(t["error"], t["allowed"], (what, t))
            self.assertLess(t["allowed"], 40 * unit, (what, t))

    def test_chains(self):
        for number, (chain, rows, cols) in enumerate(CHAINS):
            for dtype in ("f32", ("bf16", "f16")[number % 2]):
                self.checked(chain, rows, cols, dtype, "none")

    def test_products_and_recipes(self):
        for number, (chain, rows, cols) in enumerate(PRODUCTS):
            for recipe in ("none", "delayed", "current", "mxfp8", "block"):
                dtype = ("bf16", "f32", "f16", "bf16")[number]
                self.checked(chain, rows, cols, dtype, recipe)
        for keep in ("fp8", "recompute"):
            self.checked(RESIDUAL, 20, 96, "bf16", "none", "--keep", keep)
            self.checked(RESIDUAL, 20, 96, "bf16", "mxfp8", "--keep", keep)
        self.checked(RESIDUAL, 20, 96, "bf16", "none", "--precision", "strict", "--rounding",
                     "eager")
        self.checked("dropout(0.5) gelu", 20, 96, "f32", "none", "--eval")

    def test_text(self):
        out, err = self.run_it(RESIDUAL, "--rows", "20", "--backward", repeat="2")
        self.assertEqual(err, "")
        for word in ("chain   " + RESIDUAL, "input   20 x 96 f32, recipe none, cpu, native, once",
                     "random  x, dy, layernorm1.gamma", "initial linear2.weight, linear5.weight",
                     "check   20 rows", "  dx  ",
                     "time    median of 2", "  F1 ", "  B1 ", "GB/s", "GFLOP/s",
                     "one op at a time"):
            self.assertIn(word, out)
        self.assertNotIn("WRONG", out)
        out, _ = self.run_it("gelu", "--cols", "8", "--no-check")
        self.assertNotIn("check", out)
        self.assertIsNone(self.json("gelu", "--cols", "8", "--no-check")["check"])

    def test_times(self):
        args = ["linear(64,256) bias swiglu linear(128,64)", "--rows", "32", "--backward",
                "--recipe", "current", "--dtype", "bf16"]
        time = self.json(*args, repeat="3")["time"]
        done = subprocess.run([TENON, "plan", *args, "--format", "json"], capture_output=True,
                              check=True)
        plan = json.loads(done.stdout)
        steps = plan["forward"] + plan["backward"]
        self.assertEqual([p["bytes"] for p in time["passes"]], [s["bytes"] for s in steps])
        self.assertEqual([p["flops"] for p in time["passes"]], [s["flops"] for s in steps])
        self.assertEqual([p["name"] for p in time["passes"]],
                         [s["head"] + " " + s["name"] for s in steps])
        self.assertTrue(all(p["ms"] > 0 for p in time["passes"]))
        self.assertGreater(min(time["fused_ms"], time["unfused_ms"]), 0)
        self.assertIsNone(self.json(*args)["time"])

    def test_given_tensors(self):
        # y = x·Wᵀ + b and its gradients, by hand. Small integers are exact.
        x, w, b, dy = [1, 2, 3, -4, 5, -6], [1, 0, 2, -1, 3, 1], [10, 20], [1, 2, -1, 3]
        path, out = self.path("in.safetensors"), self.path("out.safetensors")
        write_safetensors(path, {
            "x": ("F64", [1, 2, 3], x), "linear0.weight": ("F32", [2, 3], w),
            "bias1.bias": ("F16", [2], b), "dy": ("F32", [2, 2], dy)})
        args = ["linear(3,2) bias", "--backward", "--input", path, "--output", out]
        for dtype, stored in (("f32", "F32"), ("bf16", "BF16"), ("f16", "F16")):
            got = self.json(*args, "--dtype", dtype, "--tolerance", "0")
            self.assertEqual(got["rows"], 2)
            self.assertEqual(set(got["from"].values()), {"file"})
            tensors = read_safetensors(out)
            self.assertTrue(all(t[0] == stored for t in tensors.values()))
            got = {name: (shape, v) for name, (_, shape, v) in tensors.items()}
            self.assertEqual(got, {
                "y": ([2, 2], [sum(x[3 * r + k] * w[3 * o + k] for k in range(3)) + b[o]
                               for r in range(2) for o in range(2)]),
                "dlinear0.weight": ([2, 3], [sum(dy[2 * r + o] * x[3 * r + k] for r in range(2))
                                             for o in range(2) for k in range(3)]),
                "dbias1.bias": ([2], [dy[0] + dy[2], dy[1] + dy[3]]),
                "dx": ([2, 3], [sum(dy[2 * r + o] * w[3 * o + k] for o in range(2))
                                for r in range(2) for k in range(3)])})

    def test_encoded_outputs_are_written_as_numbers(self):
        path, out = self.path("q.safetensors"), self.path("q_out.safetensors")
        x = [1, -2, 3.5, 448, 0.5, -0.25, 7, 9]
        write_safetensors(path, {"x": ("F32", [1, 8], x)})
        self.run_it("quantize(recipe=mxfp8)", "--input", path, "--output", out)
        # The largest number gives the scale 1, and all others are e4m3 numbers.
        self.assertEqual(read_safetensors(out), {"y": ("F32", [1, 8], x)})
        for recipe in ("delayed", "current", "mxfp8", "block"):
            got = self.json("linear(64,64) gelu quantize", "--rows", "33", "--recipe", recipe)
            self.assertTrue(got["check"]["ok"])

    def test_npy_is_x(self):
        path, out = self.path("a.npy"), self.path("out.safetensors")
        head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
        head += b" " * (64 - (10 + len(head) + 1) % 64) + b"\n"
        with open(path, "wb") as f:
            f.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
            f.write(struct.pack("<6f", 1, -2, 3, -4, 5, -6))
        self.run_it("relu", "--input", path, "--output", out)
        self.assertEqual(read_safetensors(out), {"y": ("F32", [2, 3], [1, 0, 3, 0, 5, 0])})

    def test_seeds(self):
        files = []
        for number, seed in enumerate(("1", "1", "2")):
            files.append(self.path(f"{number}.safetensors"))
            self.run_it(RESIDUAL + " dropout(0.3)", "--rows", "8", "--backward", "--seed", seed,
                        "--output", files[-1], "--no-check")
        one, same, other = (read_safetensors(f) for f in files)
        self.assertEqual(one, same)
        self.assertTrue(all(one[name] != other[name] for name in one))
        # Tensors that are not in the file keep their random values.
        path = self.path("x.safetensors")
        write_safetensors(path, {"dy": ("F32", [8, 96], [0.0] * 768)})
        out = self.path("zero.safetensors")
        self.run_it(RESIDUAL + " dropout(0.3)", "--rows", "8", "--backward", "--input", path,
                    "--output", out)
        zero = read_safetensors(out)
        self.assertEqual(zero["y"], one["y"])
        self.assertEqual(set(zero["dx"][2]), {0.0})

    def test_numbers_that_are_not_finite(self):
        path, out = self.path("in.safetensors"), self.path("out.safetensors")
        x = [0.5] * 24
        x[9] = math.nan
        write_safetensors(path, {"x": ("F32", [3, 8], x)})
        got = self.json("rmsnorm gelu", "--input", path, "--output", out)
        y, = got["check"]["tensors"]
        self.assertEqual((y["ok"], y["not_finite"]), (True, 8))
        values = read_safetensors(out)["y"][2]
        self.assertEqual([math.isnan(v) for v in values], [r == 1 for r in range(3)
                                                           for _ in range(8)])
        # Values too large for the format are infinite, and this is correct.
        write_safetensors(path, {"x": ("F32", [1, 2], [60000.0, 3.0])})
        got = self.json("scale(2)", "--input", path, "--output", out, "--dtype", "f16")
        self.assertEqual(got["check"]["tensors"][0]["not_finite"], 1)
        self.assertEqual(read_safetensors(out)["y"][2], [math.inf, 6.0])

    def test_the_check_fails_where_it_should(self):
        # Rounded results fail with tolerance 0, exact results pass.
        out, err = self.run_it("gelu", "--cols", "64", "--dtype", "bf16", "--tolerance", "0",
                               code=1)
        self.assertIn("WRONG", out)
        self.assertIn("'y' is not what float64 gives: error", err)
        self.run_it("scale(2) identity", "--cols", "64", "--backward", "--tolerance", "0")
        # The error of a quantised chain is that of its format, not that of f32.
        args = ["linear(64,64)", "--rows", "64", "--recipe", "mxfp8"]
        y, = self.json(*args)["check"]["tensors"]
        self.assertTrue(2**-7 < y["error"] < 2**-3, y)
        y, = self.json(*args, "--tolerance", str(y["error"] / 2), code=1)["check"]["tensors"]
        self.assertFalse(y["ok"])

    def test_rows_of_nearly_equal_numbers(self):
        # rstdev amplifies the rounding error of the mean. The tolerance allows this, but not much
        # more.
        for seed in range(1, 9):
            y, = self.json("layernorm(2)", "--rows", "64", "--dtype", "f32", "--seed",
                           str(seed))["check"]["tensors"]
            self.assertTrue(y["ok"], (seed, y))
            self.assertLess(y["allowed"], 2**-15, (seed, y))

    def test_sums_whose_terms_cancel(self):
        # The last sum or gradient may cancel, so that little remains of the rounded terms.
        for chain, *options in (
            ("rmsnorm(1)", "--rows", "5"),
            ("l2norm", "--cols", "1", "--rows", "7"),
            ("bias", "--cols", "1", "--rows", "7"),
            ("linear(512,1)", "--rows", "1"),
        ):
            for seed in (1, 2, 17, 28):
                got = self.json(chain, *options, "--backward", "--seed", str(seed))
                for t in got["check"]["tensors"]:
                    self.assertTrue(t["ok"], (chain, seed, t))

    def test_formulas_have_parameters(self):
        y, = self.json('act("x*sigmoid(beta*x); beta=1.7",beta=2)', "--cols",
                       "4")["check"]["tensors"]
        self.assertTrue(y["ok"], y)

    @unittest.skipIf(os.environ.get("TENON_TEST_EVERY", "1") != "1", "a large product")
    def test_large_chains_are_checked_in_part(self):
        got = self.json("linear(2048,2048)", "--rows", "512", "--backward", "--tolerance", "1e-4")
        check = got["check"]
        self.assertTrue(0 < check["rows"] < 512)
        self.assertEqual(check["left_out"], ["dlinear0.weight"])
        self.assertEqual([t["name"] for t in check["tensors"]], ["y", "dx"])

    def test_mistakes(self):
        def refused(args, *words, code=2):
            out, err = self.run_it(*args, code=code)
            self.assertEqual(out, "")
            for word in words:
                self.assertIn(word, err)

        refused(["mystery", "--cols", "8"], "mystery0", "no op of this name", "opaque")
        refused(["gelu"], "columns")
        cuda = ["gelu", "--cols", "8", "--device", "cuda"]
        if "cuda: usable" not in subprocess.run([TENON, "doctor"], capture_output=True, text=True).stdout:
            refused(cuda, "--device cuda", "cpu", code=3)
        refused(["gelu", "--cols", "8", "--device", "null"], "--device null", "plan")
        refused(["gelu", "--cols", "8", "--tolerance", "-1"], "--tolerance -1")
        refused(["gelu", "--cols", "8", "--rows", "0"], "run --rows 0")
        refused(["reshape(3)", "--cols", "4", "--rows", "2"], "multiple of 3")
        refused(["make_extra_output>a linear(4,8) add<a"], "column 33", "'a' has 4 columns", "8")
        refused(["make_extra_output>a reshape(4) add<a", "--cols", "8"], "'a' has 8 columns")
        refused(["swiglu linear(4,8)"], "how wide")
        refused(["linear(0,3)"], "in is 0")
        refused(["gated(mish)", "--cols", "8"], 'act("gated(')
        refused(["silu(layout=swapped)", "--cols", "8"], "no halves")
        refused(["gelu", "--cols", "8", "--output", "/no/such/folder/x"], "--output",
                "cannot be opened")
        refused(["gelu", "--cols", "8", "--input", "/no/such/file"], "/no/such/file",
                "cannot be opened")
        path = self.path("in.safetensors")
        with open(path, "wb") as f:
            f.write(b"not a tensor")
        refused(["gelu", "--cols", "8", "--input", path], "in.safetensors", "header")
        write_safetensors(path, {"x": ("I32", [2, 8], [0] * 16)})
        refused(["gelu", "--cols", "8", "--input", path], "'x'", "dtype", "f32")
        write_safetensors(path, {"x": ("F32", [2, 4], [0.0] * 8), "w\x1b": ("F32", [1], [0.0])})
        refused(["gelu", "--input", path], "no tensor 'w\ufffd'", "it reads x")
        write_safetensors(path, {"x": ("F32", [2, 4], [0.0] * 8)})
        refused(["linear(5,2)", "--input", path], "linear0", "4 columns")
        refused(["gelu", "--input", path, "--rows", "3"], "--rows 3", "2 rows")
        refused(["gelu", "--input", path, "--cols", "8"], "--cols 8", "4 columns")
        write_safetensors(path, {"bias0.bias": ("F32", [4], [0.0] * 4)})
        refused(["bias", "--cols", "8", "--input", path], "'bias0.bias' is 1 x 4", "wants 1 x 8")
        refused(["gelu", "--cols", "8", "--input", path], "no tensor 'bias0.bias'")
        write_safetensors(path, {"other": ("I32", [1, 2], [1, 2])})
        _, err = self.run_it("gelu", "--cols", "2", "--input", path)
        self.assertIn("1 tensor of I32 left out", err)
        write_safetensors(path, {"x": ("F32", [0, 4], [])})
        refused(["gelu", "--input", path], "--rows 0")


if __name__ == "__main__":
    unittest.main()
