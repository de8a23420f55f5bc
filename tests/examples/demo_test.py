#!/usr/bin/env python3
"""demo_test.py DEMO: the demonstration learns, says what it did, and repeats itself."""
import os
import re
import subprocess
import sys
import unittest

DEMO = os.path.abspath(sys.argv.pop(1))


class Demo(unittest.TestCase):
    def run_it(self, *args, code=0, threads="2"):
        done = subprocess.run([DEMO, *args], capture_output=True, timeout=300,
                              env={**os.environ, "TENON_THREADS": threads})
        self.assertEqual(done.returncode, code, (args, done.stdout[-3000:], done.stderr[-2000:]))
        return done.stdout.decode(), done.stderr.decode()

    def check(self, *args):
        out, err = self.run_it("--steps", "12", *args)
        self.assertEqual(err, "")
        lines = re.findall(r"^ +(\d+) +(\d+\.\d{4}) +(\d+)$", out, re.M)
        self.assertEqual([int(step) for step, _, _ in lines], list(range(1, 13)))
        losses = [float(loss) for _, loss, _ in lines]
        # At first every letter of 45 is about as likely: ln 45 nats.
        self.assertTrue(3.5 < losses[0] < 4.5, losses)
        self.assertLess(losses[-1], losses[0] - 0.5, losses)
        self.assertIn(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}: it fell", out)
        self.assertIn("strict and eager: the losses of 10 steps are the same bit for bit", out)
        return out

    def test_it_learns(self):
        out = self.check()
        for word in ("recipe none, seed 1", 'after "A joiner who makes"', "A joiner who makes",
                     "The plan:", "forward: 5 passes", "gemm linear+bias+swiglu",
                     "gemm linear+bias+dropout+add", "ms a step fused", "ms op by op"):
            self.assertIn(word, out)

    def test_formats(self):
        self.check("--dtype", "bf16")
        out = self.check("--dtype", "bf16", "--recipe", "mxfp8")
        self.assertIn("recipe mxfp8", out)
        self.assertIn("e4m3 mxfp8", out)

    def test_it_repeats_itself(self):
        def text(*args, **more):
            out, _ = self.run_it("--steps", "3", *args, **more)
            out = re.sub(r"^( +\d+ +\d+\.\d{4}) +\d+$", r"\1", out, flags=re.M)
            return re.sub(r"\d+\.\d\d ms.*|\d threads", "", out)

        first = text()
        self.assertEqual(first, text(threads="1"))
        self.assertNotEqual(first, text("--seed", "2"))

    def test_mistakes(self):
        for args, word in ((["--steps", "1"], "--steps"), (["--dtype", "f16"], "--dtype"),
                           (["--recipe", "fp4"], "mxfp8"), (["more"], "more")):
            out, err = self.run_it(*args, code=2)
            self.assertEqual(out, "")
            self.assertIn(word, err)


if __name__ == "__main__":
    unittest.main()
