#!/usr/bin/env python3
"""plan_command_test.py TENON: tests of `tenon plan` as text, JSON and HTML page."""
import html.parser
import itertools
import os
import re
import tempfile
import unittest

from command import CommandTest, strict_json

SIZES = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "e8m0": 1, "u64": 8}
MLP = "linear(512,2048) bias swiglu linear(1024,512)"
CHAINS = [
    ("bias gelu", "64"), ("bias dropout(0.1) add", "64"), ("rmsnorm(96) bias", "0"),
    ("layernorm(96) quantize", "0"), ("l2norm scale(0.5)", "33"),
    ('act("select(x<0, 0.1*x, x)")', "40"), ("swiglu(layout=swapped)", "64"),
    ("linear(48,96) bias relu", "0"), (MLP, "0"),
    ("make_extra_output>res rmsnorm(64) linear(64,256):up swiglu linear(128,64) add<res", "0"),
    ("reshape(32) gelu reshape(64)", "64"), ("linear(64,64) scale(2) add make_extra_output", "0"),
]
RECIPES = ["none", "delayed", "current", "mxfp8", "block"]
PLAN = ["format", "tenon", "chain", "dtype", "recipe", "device", "target", "rows", "options", "forward",
        "backward", "buffers", "saved_bytes", "workspace_bytes"]
STEP = ["name", "head", "ops", "maker", "body", "reads", "writes", "bytes", "flops", "floor_us",
        "when", "why", "refused", "steps", "alternatives"]
BUFFER = ["name", "role", "dtype", "rows", "cols", "inner", "bytes"]
HEADS = {"map", "gemm", "norm", "norm_grad", "copy", "collective", "opaque"}
ROLES = {"input", "output", "param", "grad", "extra_in", "extra_out", "saved", "state",
         "workspace", "rng"}
MODES = {"none", "delayed", "current", "mxfp8", "block1x128", "block128x128"}


def cdiv(a, b):
    return -(-a // b)


def cases(*lists):
    """All combinations. With sanitizers, every n-th one (tests/support/support.h)."""
    every = int(os.environ.get("TENON_TEST_EVERY", "1"))
    return itertools.islice(itertools.product(*lists), 0, None, every)


class Page(html.parser.HTMLParser):
    """Raises an error for wrong nesting of tags, duplicate ids and external references."""
    VOID = {"meta", "link", "br", "hr", "img", "input"}

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.labels, self.text = [], set(), [], []
        self.tags, self.first_of, self.problems = [], {}, []
        self.feed(text)
        self.close()
        if self.open:
            self.problems.append(("left open", self.open))
        self.problems += [("no such id", i) for i in self.labels if i not in self.ids]

    def handle_starttag(self, tag, attrs, closed=False):
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name == "id":
                if value in self.ids:
                    self.problems.append(("id twice", value))
                self.ids.add(value)
            if name == "aria-labelledby":
                self.labels += value.split()
            if name.startswith("on") or name in ("src", "srcset", "action"):
                self.problems.append((tag, name))
            if name == "href" and not value.startswith(("#", "data:")):
                self.problems.append((tag, name, value))
        if len({name for name, _ in attrs}) != len(attrs):
            self.problems.append(("attribute twice", tag, attrs))
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.problems.append(tag)
        if tag not in self.VOID and not closed:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs, closed=True)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(("does not nest", tag, self.getpos()))

    def handle_data(self, data):
        self.text.append(data)
        if self.open:
            self.first_of.setdefault(self.open[-1], []).append(data)


class PlanCommand(CommandTest):
    NAME = ("plan",)

    def plan(self, chain, *args, device="null", backward=True):
        more = ["--backward"] if backward else []
        text = self.run_it(chain, "--format", "json", "--device", device, *more, *args)[0]
        return strict_json(text)

    def check_step(self, step, buffers, ops, what):
        self.assertEqual(list(step), STEP, what)
        self.assertIn(step["head"], HEADS, what)
        self.assertIn(step["when"], ("always", "weights_changed"), what)
        self.assertTrue(step["ops"] and all(0 <= i < ops for i in step["ops"]), what)
        self.assertIsNone(step["floor_us"], what)
        self.assertGreater(step["bytes"], 0, what)
        self.assertEqual(step["flops"] > 0, step["head"] == "gemm", what)
        self.assertTrue(step["maker"] and step["body"], what)
        self.assertTrue(step["reads"], what)
        for read in step["reads"]:
            name, side = read.rsplit(":", 1)
            self.assertIn(side, ("row", "col"), what)
            self.assertIn(name + (".t" if side == "col" else ""), buffers, (what, read))
        for write in step["writes"]:
            self.assertEqual(list(write), ["buffer", "format", "mode", "orient"], what)
            self.assertIn(write["format"], SIZES, what)
            self.assertIn(write["mode"], MODES, what)
            self.assertIn(write["orient"], ("row", "col", "rowcol"), what)
            if "row" in write["orient"]:
                self.assertIn(write["buffer"], buffers, what)
            if "col" in write["orient"]:
                self.assertIn(write["buffer"] + ".t", buffers, what)
        for refused in step["refused"]:
            self.assertEqual(list(refused), ["maker", "why"], what)
            self.assertTrue(refused["why"], what)

    def check_plan(self, plan, rows, what):
        self.assertEqual(list(plan), PLAN, what)
        self.assertEqual((plan["format"], plan["rows"]), (1, rows), what)
        ops = len(re.sub(r'"[^"]*"', "", plan["chain"]).split())
        buffers = {}
        for b in plan["buffers"]:
            shared = "same_as" in b  # a result that is another tensor, and so is not written
            self.assertEqual(list(b), BUFFER + ["same_as"] * shared, what)
            self.assertIn(b["role"], ROLES, what)
            self.assertIn(b["inner"], ("rows", "cols"), what)
            mul, div, round_to, add = b["rows"]
            high = cdiv(cdiv(rows * mul, div), round_to) * round_to + add
            self.assertEqual(b["bytes"], high * b["cols"] * SIZES[b["dtype"]], (what, b))
            self.assertNotIn(b["name"], buffers, what)
            buffers[b["name"]] = b
        written = {w["buffer"] for s in plan["forward"] + plan["backward"] for w in s["writes"]}
        for b in plan["buffers"]:
            if "same_as" in b:
                self.assertIn(b["role"], ("grad", "extra_out"), what)
                self.assertIn(b["same_as"], buffers, what)
                self.assertNotIn(b["name"], written, what)
        for step in plan["forward"] + plan["backward"]:
            self.check_step(step, buffers, ops, what)
        sizes = {role: sum(b["bytes"] for b in plan["buffers"] if b["role"] == role)
                 for role in ROLES}
        self.assertEqual(plan["saved_bytes"], sizes["saved"], what)
        slack = 64 * len(buffers)  # workspace buffers begin at multiples of 64
        self.assertLessEqual(plan["workspace_bytes"], sizes["workspace"] + slack, what)
        # No buffer is written twice.
        for direction in ("forward", "backward"):
            names = [w["buffer"] for s in plan[direction] for w in s["writes"]]
            self.assertEqual(len(names), len(set(names)), (what, names))

    def test_json_of_many_chains(self):
        for (chain, cols), recipe, (dtype, rows) in cases(CHAINS, RECIPES,
                                                          [("f32", 7), ("bf16", 256)]):
            rows = rows * 2 if "reshape" in chain else rows
            plan = self.plan(chain, "--cols", cols, "--recipe", recipe, "--dtype", dtype,
                             "--rows", str(rows))
            self.check_plan(plan, rows, (chain, recipe, dtype))
            self.assertEqual((plan["dtype"], plan["recipe"], plan["device"]),
                             (dtype, recipe, "null"))
            self.assertTrue(plan["backward"])

    def test_options(self):
        plan = self.plan("gelu", "--cols", "64", "--precision", "strict", "--rounding", "eager")
        self.assertEqual(plan["options"], {"precision": "strict", "rounding": "eager"})
        self.assertEqual(self.plan("gelu", "--cols", "8", backward=False)["backward"], [])
        kept = [b["role"] for b in self.plan("dropout(0.5)", "--cols", "8", "--eval")["buffers"]]
        self.assertNotIn("rng", kept)
        kept = [b["role"] for b in self.plan("dropout(0.5)", "--cols", "8")["buffers"]]
        self.assertIn("rng", kept)
        plan = self.plan(MLP, "--gbps", "100", "--tflops", "2")
        for step in plan["forward"] + plan["backward"]:
            floor = max(step["bytes"] / 100e3, step["flops"] / 2e6)
            self.assertAlmostEqual(step["floor_us"], floor, delta=1e-9 * floor)
        # A target has peaks: 4.8 TB/s and 989 TFLOP/s, twice as many for 8-bit operands.
        for recipe, rate in (("none", 1), ("mxfp8", 2)):
            plan = self.plan(MLP, "--target", "sm_90a", "--recipe", recipe, "--dtype", "bf16",
                             device="cuda")
            for step in plan["forward"]:
                floor = max(step["bytes"] / 4.8e6, step["flops"] / 989e6 / rate)
                self.assertAlmostEqual(step["floor_us"], floor, delta=1e-9 * floor)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "chain.txt")
            with open(path, "w", encoding="utf-8") as f:
                f.write("# a comment\nbias\n  gelu # and more\n")
            out = os.path.join(folder, "plan.json")
            args = ["--cols", "64", "--format", "json"]
            self.assertEqual(self.run_it("@" + path, *args, "-o", out)[0], "")
            with open(out, encoding="utf-8") as f:
                self.assertEqual(f.read(), self.run_it("bias gelu", *args)[0])

    def near(self, got, want, what):
        """Compares without scalars: scales and amax are a few bytes per tensor."""
        self.assertTrue(want <= got <= want + 32, (what, got, want))

    def test_bytes_of_one_pass(self):
        for dtype in ("f32", "f16", "bf16"):
            size, rows, cols = SIZES[dtype], 37, 96
            tensor = rows * cols * size
            args = ["--cols", str(cols), "--rows", str(rows), "--dtype", dtype]
            plan = self.plan("bias gelu", *args, device="cpu")
            step, = plan["forward"]
            # Reads x and the bias. Writes y and the tensor for backward.
            self.assertEqual(step["bytes"], 3 * tensor + cols * size)
            self.assertEqual(plan["saved_bytes"], tensor)
            step, = plan["backward"]
            self.assertEqual(step["bytes"], 3 * tensor + cols * size)
            step, = self.plan("bias gelu", *args, device="cpu", backward=False)["forward"]
            self.assertEqual(step["bytes"], 2 * tensor + cols * size)
            step, = self.plan("swiglu", *args, device="cpu", backward=False)["forward"]
            self.assertEqual(step["bytes"], tensor + tensor // 2)
            plan = self.plan("bias dropout(0.1) add", *args, device="cpu")
            self.assertEqual((len(plan["forward"]), len(plan["backward"])), (1, 1))
            self.assertEqual(plan["forward"][0]["bytes"], 3 * tensor + cols * size + 40)
            self.assertEqual(plan["saved_bytes"], 40)  # the state of the random stream

    def test_the_gated_mlp(self):
        m, k, n, h = 512, 512, 2048, 1024
        args = ["--rows", str(m), "--dtype", "bf16", "--recipe", "delayed"]
        plan = self.plan(MLP, *args)
        forward = [s for s in plan["forward"] if s["when"] == "always"]
        self.assertEqual([s["head"] for s in forward], ["map", "gemm", "gemm"])
        self.assertEqual([s["ops"] for s in forward], [[0], [0, 1, 2], [3]])
        self.assertEqual(len(plan["forward"]) - len(forward), 2)
        # Four bytes for each multiplier, scale_inv and amax.
        self.assertEqual(forward[0]["bytes"], 2 * m * k + m * k + 3 * 4)
        self.assertEqual(forward[1]["bytes"], m * k + n * k + 2 * n + 2 * m * n + m * h + 5 * 4)
        self.assertEqual(forward[2]["bytes"], m * h + k * h + 2 * m * k + 2 * 4)
        self.assertEqual([s["flops"] for s in forward], [0, 2 * m * n * k, 2 * m * h * k])
        self.assertEqual([(w["format"], w["mode"], w["orient"]) for w in forward[1]["writes"][:2]],
                         [("bf16", "none", "row"), ("e4m3", "delayed", "row")])
        self.assertEqual([s["head"] for s in plan["backward"]], ["map"] + 4 * ["gemm"])
        self.assertEqual(sum(s["flops"] for s in plan["backward"]), 2 * 2 * m * (n * k + h * k))
        pre, x, a = 2 * m * n, m * k, m * h
        self.near(plan["saved_bytes"], x + pre + a, "input")
        fp8 = m * n + m * (n // 128) * 4
        self.near(self.plan(MLP, *args, "--keep", "fp8")["saved_bytes"], x + fp8 + a, "fp8")
        again = self.plan(MLP, *args, "--keep", "recompute")
        self.near(again["saved_bytes"], x + pre, "recompute")
        self.assertTrue(any("again" in s["why"] for s in again["forward"] + again["backward"]))

    def test_refused_makers(self):
        step, = self.plan("rmsnorm(64)", "--rows", "7", device="cpu", backward=False)["forward"]
        if step["maker"] != "norm":
            self.assertIn("norm", [r["maker"] for r in step["refused"]])

    def test_runner(self):
        """TENON_RUNNER chooses between compiled and interpreted bodies."""
        chain = ("gelu", "--cols", "8", "--format", "json")

        def forward(runner):
            out, err = self.run_it(*chain, env={"TENON_RUNNER": runner} if runner else None)
            return strict_json(out)["forward"][0], err

        usual, quiet = forward(None)
        self.assertEqual(quiet, "")
        self.assertEqual(forward("jit"), (usual, ""))
        self.assertEqual(forward("fast"), (usual,
                         "tenon: TENON_RUNNER=fast is ignored; give jit or interpreter\n"))
        step, quiet = forward("interpreter")
        self.assertEqual((step["maker"], quiet), ("executor", ""))
        if usual["maker"] == "jit":
            self.assertEqual(step["refused"], [{"maker": "jit", "why": "TENON_RUNNER=interpreter"}])

    def test_text(self):
        out, _ = self.run_it(MLP, "--rows", "4096", "--dtype", "bf16", "--recipe", "delayed",
                             "--backward", "--device", "null")
        for word in ("chain   " + MLP,
                     "input   4096 x 512 bf16, recipe delayed, null, native, once",
                     "forward: 3 passes", "backward: 5 passes", "gemm linear+bias+swiglu",
                     "(when the weights changed)", "linear3.x (e4m3 delayed row)", "saved   "):
            self.assertIn(word, out)
        again, _ = self.run_it(MLP, "--rows", "4096", "--dtype", "bf16", "--recipe", "delayed",
                               "--backward", "--device", "null",
                               env={"LC_ALL": "de_DE.UTF-8"})
        self.assertEqual(out, again)
        out, _ = self.run_it("gelu", "--cols", "8")
        self.assertIn("forward: 1 pass\n", out)
        self.assertNotIn("backward", out)

    def page(self, chain, *args):
        text, _ = self.run_it(chain, "--format", "html", "--device", "null", *args)
        page = Page(text)
        self.assertEqual(page.problems, [], chain)
        self.assertTrue(text.startswith("<!DOCTYPE html>"))
        self.assertNotRegex(text, r"(?i)https?://|url\(|@import|//[a-z0-9]+\.[a-z]")
        self.assertNotRegex(text, r"&(?!(amp|lt|gt|quot|#39);)")
        self.assertNotRegex(text, r"(?i)\bnan\b|\binf\b")
        return text, page

    def test_page(self):
        for (chain, cols), recipe, more in cases(CHAINS, ["none", "mxfp8", "current"],
                                                 [[], ["--backward"]]):
            args = ["--cols", cols, "--recipe", recipe, "--rows", "64", "--dtype", "bf16"]
            text, page = self.page(chain, *args, *more)
            plan = self.plan(chain, *args, backward=bool(more))
            passes = [f"{d[0].upper()}{i + 1}" for d in ("forward", "backward")
                      for i in range(sum(s["when"] == "always" for s in plan[d]))]
            tags = [t for t in page.first_of["th"] if re.fullmatch(r"[FB]\d+", t)]
            self.assertEqual(tags, passes, (chain, recipe))
            self.assertEqual(page.first_of["h1"], [plan["chain"]])
            shown = "".join(page.text)
            for buffer in plan["buffers"]:
                self.assertIn(buffer["name"], shown)
            for word in ("prefers-color-scheme:dark", "max-width", "viewport"):
                self.assertIn(word, text)
            figures = [a for t, a in page.tags if t == "svg" and a.get("role") == "img"]
            self.assertEqual(len(figures), 2 if plan["backward"] else 1)
            self.assertTrue(all(a["aria-label"] for a in figures))
            for _, a in page.tags:
                for key in {"x", "y", "width", "height", "cx", "cy"} & set(a):
                    self.assertTrue(-1 <= float(a[key]) < 1e5, a)

    def test_page_of_a_long_chain(self):
        _, page = self.page(" ".join(["linear(32,32) bias gelu"] * 20), "--backward")
        self.assertIn("F20", page.first_of["th"])

    def test_page_escapes(self):
        chain = 'act("select(x<0, 0.1*x, x)"):lab make_extra_output>c add<c'
        text, page = self.page(chain, "--cols", "40", "--backward")
        self.assertEqual(page.first_of["h1"], [chain])
        self.assertIn("act(&quot;select(x&lt;0, 0.1*x, x)&quot;):lab", text)
        self.assertIn("select(x &lt; 0,", text)
        self.assertNotIn("select(x<", text)

    def test_mistakes(self):
        def refused(args, *words):
            out, err = self.run_it(*args, code=2)
            self.assertEqual(out, "")
            for word in words:
                self.assertIn(word, err)

        refused([], "CHAIN")
        refused(["linear(5", "--format", "json"], "line 1, column 9", "linear", "','")
        refused(["bias\n  gelu )"], "line 2, column 8")
        refused(["bias & gelu"], "line 1, column 6", "'&'")
        refused([""], "line 1, column 1", "the name of an op")
        refused(["nothing", "--cols", "8"], "nothing0", "no op of this name")
        refused(["gelu"], "columns")
        refused(["linear(5,7) linear(8,9)", "--device", "null"], "linear1", "7 columns", "wants 8")
        # An error of an op contains its position in the text.
        refused(["linear(4,8) geglu\n linear(5,6)"], "line 2, column 2", "linear2", "wants 5")
        refused(["swiglu", "--cols", "7"], "swiglu0", "even")
        refused(['act("x+")', "--cols", "8"], "line 1, column 3")
        refused(["add<nobody", "--cols", "8"], "add0", "nobody")
        refused(["reshape(3)", "--cols", "4", "--rows", "2"], "multiple of 3")
        refused(["gelu", "--cols", "8", "--rows", "0"], "--rows 0")
        refused(["gelu", "--cols", "-8"], "--cols -8")
        refused(["gelu", "--cols", "8", "--recipe", "fp4"], "fp4", "mxfp8")
        for option in ("--dtype", "--keep", "--precision", "--rounding", "--device", "--format"):
            refused(["gelu", "--cols", "8", option, "neither"], option, "neither")
        refused(["gelu", "--cols", "8", "--gbps", "-1"], "--gbps -1")
        refused(["gelu", "--cols", "8", "--tflops", "1"], "--gbps")
        refused(["@/no/such/file"], "/no/such/file", "cannot be opened")
        refused(["@/"], "cannot be read")
        refused(["gelu", "--cols", "8", "-o", "/no/such/folder/x"], "cannot be opened")
        refused(["a" * 70000], "65536")


if __name__ == "__main__":
    unittest.main()
