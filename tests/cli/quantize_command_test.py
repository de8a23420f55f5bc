#!/usr/bin/env python3
"""quantize_command_test.py TENON: tests `tenon quantize` against the rules of the specification."""
import bisect
import json
import math
import os
import random
import struct
import unittest
import xml.etree.ElementTree as xml

from command import CommandTest, safetensors, strict_json

INF, NAN = math.inf, math.nan


def fl32(v):
    """Rounds to fp32. Overflow gives infinity."""
    try:
        return struct.unpack("<f", struct.pack("<f", v))[0]
    except OverflowError:
        return math.copysign(INF, v)


def bits(v):
    return struct.unpack("<I", struct.pack("<f", v))[0]


def from_bits(b):
    return struct.unpack("<f", struct.pack("<I", b))[0]


class Fp8:
    """All magnitudes of a format. Rounds to the nearest one, ties to the even code."""

    def __init__(self, mantissa, bias, most):
        self.values = []
        for code in range(most + 1):
            e, frac = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
            self.values.append(frac * 2.0 ** (1 - bias) if e == 0
                               else (1 + frac) * 2.0 ** (e - bias))
        self.most = self.values[-1]
        # Half a step above the largest value. Values up to here round to the largest.
        self.cut_off = self.most + (self.values[-1] - self.values[-2]) / 2

    def cast(self, v):
        size = abs(v)
        if v != v:
            return NAN
        if size >= self.most:
            return math.copysign(self.most, v)
        hi = bisect.bisect_left(self.values, size)
        lo = max(hi - 1, 0)
        down, up = size - self.values[lo], self.values[hi] - size
        pick = lo if down < up or (down == up and lo % 2 == 0) else hi
        return math.copysign(self.values[pick], v)


FORMATS = {"e4m3": Fp8(3, 7, 0x7E), "e5m2": Fp8(2, 15, 0x7B)}
assert FORMATS["e4m3"].most == 448 and FORMATS["e5m2"].most == 57344


def e8m0(amax, fmt):
    p = fl32(amax * fl32(1 / fmt.most)) if amax == amax else NAN
    if p != p:
        return NAN, NAN
    if p == INF:
        e = 254
    else:
        field, m = bits(p) >> 23, bits(p) & 0x7FFFFF
        e = int(m > 0x400000) if field == 0 else field + int(m != 0 and field != 254)
    return 2.0 ** (127 - e), 2.0 ** (e - 127)


def fp32_scale(amax, fmt, eps, power):
    if amax < eps:
        amax = eps
    if amax == 0 or amax != amax or amax == INF:
        scale = 1.0
    else:
        scale = min(fl32(fmt.most / amax), from_bits(0x7F7FFFFF))
        if power:
            scale = from_bits(bits(scale) & 0x7F800000)
    return scale, fl32(1 / scale)


def expected(values, rows, cols, fmt, mode, columnwise=False, eps=0.0, exact=False, scale=None):
    """The result by the specification, element by element."""
    fmt = FORMATS[fmt]
    sizes = {"mxfp8": (1, 32), "block1x128": (1, 128), "block128x128": (128, 128)}
    br, bc = sizes.get(mode, (max(rows, 1), max(cols, 1)))
    if columnwise and mode in sizes:
        br, bc = bc, br
    r = dict(saturated=0, flushed=0, nonfinite=0, spoiled=0)
    squares, errors, worst, most, inverses = [], [], 0.0, 0.0, set()
    for r0 in range(0, rows, br):
        for c0 in range(0, cols, bc):
            block = [values[i * cols + j] for i in range(r0, min(r0 + br, rows))
                     for j in range(c0, min(c0 + bc, cols))]
            amax = from_bits(max(bits(v) & 0x7FFFFFFF for v in block))
            if mode == "mxfp8":
                mul, inv = e8m0(amax, fmt)
            elif scale is not None:
                mul, inv = scale, fl32(1 / scale)
            else:
                mul, inv = fp32_scale(amax, fmt, eps, mode.startswith("block") and not exact)
            inverses.add(inv if inv == inv else "nan")
            for v in block:
                if not math.isfinite(v):
                    r["nonfinite"] += 1
                    continue
                scaled = fl32(v * mul)
                q = fmt.cast(scaled)
                r["saturated"] += abs(scaled) > fmt.cut_off
                r["flushed"] += v != 0 and q == 0
                back = fl32(q * inv)
                if not math.isfinite(back):
                    r["spoiled"] += 1
                    continue
                error = abs(v - back)
                squares.append(v * v)
                errors.append(error * error)
                most = max(most, error)
                if v != 0 and back != 0:
                    worst = max(worst, error / abs(v))
    power, noise = math.fsum(squares), math.fsum(errors)
    r.update(relative_rms=math.sqrt(noise / power) if noise else 0.0, max_abs_error=most,
             worst_relative_error=worst, distinct_scales=len(inverses),
             snr_db=10 * math.log10(power / noise) if noise else None)
    return r


def npy_bytes(values, shape, descr="<f4", code="f", fortran=False, version=1):
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    data = struct.pack(f"<{len(values)}{code}", *values)
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def sample(n, seed):
    """fp32 values over many octaves, with zeros."""
    rng = random.Random(seed)
    return [0.0 if rng.random() < 0.02 else fl32(rng.gauss(0, 1) * 2.0 ** rng.uniform(-12, 6))
            for _ in range(n)]


HOSTILE = "a<b>&\"'\u001b[31m\u202e]]>\ufffe"


class QuantizeCommand(CommandTest):
    NAME = ("quantize",)

    def lines(self, *args):
        return [strict_json(line)
                for line in self.run_it("--json", *args)[0].splitlines()]

    def compare(self, got, want, what):
        for key, value in want.items():
            if isinstance(value, float):
                self.assertIsNotNone(got[key], (what, key))
                self.assertTrue(math.isclose(got[key], value, rel_tol=1e-9, abs_tol=1e-300),
                                (what, key, got[key], value))
            else:
                self.assertEqual(got[key], value, (what, key))

    def test_numbers_follow_the_specification(self):
        rows, cols = 70, 200
        values = sample(rows * cols, 1)
        path = self.path("x.npy", npy_bytes(values, (7, 10, cols)))
        for columnwise in (False, True):
            flag = ["--columnwise"] if columnwise else []
            for fmt in FORMATS:
                for mode in ("current", "mxfp8", "block1x128", "block128x128"):
                    got, = self.lines(path, "--recipe", f"{fmt}:{mode}", *flag)
                    want = expected(values, rows, cols, fmt, mode, columnwise)
                    self.compare(got, want, (fmt, mode, columnwise))
                    self.assertEqual((got["rows"], got["cols"], got["elements"]), (70, 200, 14000))
                    self.assertEqual(got["zeros"], values.count(0.0))
                    self.assertEqual(got["amax"], max(map(abs, values)))
                    self.assertEqual(got["shape"], [7, 10, 200])

    def test_options_of_the_scale(self):
        values = sample(40 * 130, 2)
        path = self.path("x.npy", npy_bytes(values, (40, 130)))
        for mode in ("current", "block1x128", "block128x128"):
            got, = self.lines(path, "--recipe", mode, "--exact-scales", "--eps", "64")
            self.compare(got, expected(values, 40, 130, "e4m3", mode, eps=64.0, exact=True), mode)
        got, = self.lines(path, "--recipe", "e5m2:delayed", "--scale", "8192")
        want = expected(values, 40, 130, "e5m2", "delayed", scale=8192.0)
        self.assertGreater(want["saturated"], 0)
        self.compare(got, want, "delayed")
        got, = self.lines(path, "--recipe", "e4m3:delayed", "--scale", "0.01")
        want = expected(values, 40, 130, "e4m3", "delayed", scale=fl32(0.01))
        self.assertGreater(want["flushed"], 1000)
        self.compare(got, want, "delayed")
        warm, = self.lines(path, "--recipe", "delayed")
        self.assertEqual(warm["scale"], fl32(448 / max(map(abs, values))))
        current, = self.lines(path, "--recipe", "current")
        self.assertEqual(warm["relative_rms"], current["relative_rms"])

    def test_bytes_and_scales(self):
        path = self.path("x.npy", npy_bytes([1.0] * 40 * 130, (40, 130)))
        want = {"e4m3:delayed": (5204, 1), "e4m3:current": (5204, 1),
                "e4m3:mxfp8": (5200 + 128 * 8, 200), "e4m3:block1x128": (5200 + 2 * 40 * 4, 80),
                "e4m3:block128x128": (5200 + 4 * 4, 2)}
        lines = self.lines(path, "--recipe", ",".join(want))
        self.assertEqual([line["recipe"] for line in lines], list(want))
        for line in lines:
            self.assertEqual((line["bytes_before"], line["bytes_after"], line["scales"]),
                             (20800, *want[line["recipe"]]), line["recipe"])
            if line["recipe"] == "e4m3:mxfp8":
                self.assertEqual(line["scale_inv_exponents"], [-8, -8])
                self.assertIsNone(line["snr_db"])

    def test_not_finite(self):
        values = sample(4 * 64, 3)
        values[5], values[70], values[200] = NAN, INF, -INF
        path = self.path("x.npy", npy_bytes(values, (4, 64)))
        for mode in ("current", "mxfp8", "block1x128", "block128x128"):
            got, = self.lines(path, "--recipe", mode)
            self.compare(got, expected(values, 4, 64, "e4m3", mode), mode)
            self.assertIsNone(got["amax"])
        self.assertEqual(expected(values, 4, 64, "e4m3", "mxfp8")["spoiled"], 31)

    def test_tiles_give_what_the_whole_gives(self):
        values = sample(2 * 16500, 4)
        path = self.path("wide.npy", npy_bytes(values, (2, 16500)))
        for mode in ("current", "mxfp8", "block1x128"):
            got, = self.lines(path, "--recipe", mode)
            self.compare(got, expected(values, 2, 16500, "e4m3", mode), mode)
        period, times = sample(256, 5), 16384 + 3
        small = self.path("small.npy", npy_bytes(period, (256, 1)))
        large = self.path("large.npy", npy_bytes([], (times * 256, 1)) +
                           struct.pack("<256f", *period) * times)
        for recipe in ("current", "block128x128", "mxfp8"):
            a, = self.lines(small, "--recipe", recipe, "--columnwise")
            b, = self.lines(large, "--recipe", recipe, "--columnwise")
            self.assertTrue(math.isclose(a["relative_rms"], b["relative_rms"], rel_tol=1e-9))
            for key in ("saturated", "flushed", "zeros"):
                self.assertEqual(b[key], a[key] * times)
            self.assertEqual(a["distinct_scales"], b["distinct_scales"])

    def test_dtypes_and_orders_agree(self):
        values = [max(min(round(v * 64) / 64, 31.0), -31.0) for v in sample(24 * 40, 6)]
        brain = [bits(v) >> 16 for v in values]
        exact = [from_bits(b << 16) for b in brain]
        fortran = [exact[i * 40 + j] for j in range(40) for i in range(24)]
        want = None
        for name, data in {
                "f4": npy_bytes(exact, (24, 40)), "f2": npy_bytes(exact, (24, 40), "<f2", "e"),
                "f8": npy_bytes(exact, (24, 40), "<f8", "d", version=2),
                "v2": npy_bytes(brain, (24, 40), "|V2", "H", version=3),
                "fortran": npy_bytes(fortran, (24, 40), fortran=True)}.items():
            got, = self.lines(self.path("x.npy", data), "--recipe", "mxfp8")
            got = {k: got[k] for k in ("relative_rms", "max_abs_error", "flushed", "zeros", "amax")}
            want = want or got
            self.assertEqual(got, want, name)
        f64 = self.path("x.npy", npy_bytes(exact, (24, 40), "<f8", "d"))
        self.assertIn("f64 is rounded to f32", self.run_it("--recipe", "mxfp8", f64)[1])

    def model(self):
        floats = struct.pack("<64f", *sample(64, 7))
        return self.path("m.safetensors", safetensors({
            "layer.0.weight": ("F32", [2, 32], floats), "layer.1.weight": ("F32", [64], floats),
            "ids": ("I64", [2], bytes(16)), "q": ("F8_E5M2", [3], bytes(3)),
            HOSTILE: ("F16", [4, 8], struct.pack("<32e", *range(32))),
            "empty": ("BF16", [0, 5], b"")}))

    def test_safetensors(self):
        path = self.model()
        out, err = self.run_it("--recipe", "mxfp8", "--json", path)
        self.assertEqual([json.loads(line)["tensor"] for line in out.splitlines()],
                         ["layer.0.weight", "layer.1.weight", HOSTILE, "empty"])
        self.assertIn("1 tensor of I64 left out", err)
        self.assertIn("1 tensor of F8_E5M2 left out", err)

        def names(choice):
            lines = self.lines("--recipe", "mxfp8", path, "--tensor", choice)
            return [line["tensor"] for line in lines]
        self.assertEqual(names("layer"), ["layer.0.weight", "layer.1.weight"])
        self.assertEqual(names("layer.1.weight"), ["layer.1.weight"])
        every = self.lines("--recipe", "all", path)
        recipes = {line["recipe"] for line in every}
        self.assertLessEqual({"e4m3:delayed", "e5m2:block128x128"}, recipes)
        self.assertEqual(len(every), 4 * len(recipes))
        self.assertEqual(len(self.lines("--recipe", "mxfp8,e4m3:mxfp8,e5m2:current", path)), 8)

    def test_text(self):
        path = self.model()
        out, _ = self.run_it("--recipe", "all", path, "--tensor", "layer.0.weight")
        for word in ("layer.0.weight", "[2, 32] f32", "e4m3:mxfp8", "e5m2:block128x128", "SNR dB",
                     "256 B -> 576 B", "####"):
            self.assertIn(word, out)
        out, _ = self.run_it("--recipe", "all", path)
        self.assertNotIn("\x1b", out)
        self.assertNotIn("\u202e", out)
        again, _ = self.run_it("--recipe", "all", path, 
                               env={"LC_ALL": "de_DE.UTF-8", "TENON_THREADS": "3"})
        self.assertEqual(out, again)

    def test_picture(self):
        path, svg = self.model(), os.path.join(self.folder, "p.svg")
        space = "{http://www.w3.org/2000/svg}"
        for recipe in ("mxfp8", "all"):
            self.run_it("--recipe", recipe, path, "--svg", svg)
            with open(svg, "rb") as f:
                text = f.read()
            root = xml.fromstring(text)
            self.assertEqual(root.tag, space + "svg")
            self.assertIn("m.safetensors", root.find(space + "title").text)
            self.assertIn("relative RMS error", root.find(space + "desc").text)
            shown = [t.text for t in root.iter(space + "text")]
            self.assertIn("layer.0.weight", shown)
            self.assertTrue(any(t.startswith("a<b>&\"'") for t in shown))
            self.assertIn(b"prefers-color-scheme", text)
            for e in root.iter():
                for key in {"x", "y", "width", "height", "x1", "x2", "y1", "y2"} & set(e.attrib):
                    self.assertTrue(-1 <= float(e.attrib[key]) < 1e5, e.attrib)
        values = [1e30, *sample(64, 8), 1e-44, INF, NAN]
        wild = self.path("w.npy", npy_bytes(values, (68,)))
        self.run_it("--recipe", "all", wild, "--svg", svg, "--json")
        xml.parse(svg)

    def test_mistakes(self):
        good = npy_bytes(sample(6, 9), (2, 3))
        path, model = self.path("x.npy", good), self.model()

        def refused(args, *words):
            out, err = self.run_it(*args, code=2)
            self.assertEqual(out, "")
            for word in words:
                self.assertIn(word, err)

        refused([path], "--recipe")
        refused(["--recipe", "mxfp8"], "FILE")
        refused(["--recipe", "mxfp9", path], "mxfp9", "block1x128")
        refused(["--recipe", "e3m4:mxfp8", path], "e3m4", "e4m3 or e5m2")
        refused(["--recipe", "f32:current", path], "f32", "e4m3 or e5m2")
        refused(["--recipe", "none", path], "none", "scaling mode")
        refused(["--recipe", "", path], "scaling mode")
        refused(["--recipe", "mxfp8,", path], "scaling mode")
        refused(["--recipe", "mxfp8", "--eps", "1", path], "--eps")
        refused(["--recipe", "mxfp8", "--exact-scales", path], "--exact-scales")
        refused(["--recipe", "current", "--eps", "-1", path], "--eps -1", "not negative")
        refused(["--recipe", "current", "--eps", "nan", path], "--eps")
        refused(["--recipe", "current", "--scale", "2", path], "--scale 2", "delayed")
        for scale in ("-1", "inf", "nan", "1e-40"):
            refused(["--recipe", "delayed", "--scale", scale, path], "--scale", "positive")
        refused(["--recipe", "mxfp8", path + ".not"], "cannot be opened")
        refused(["--recipe", "mxfp8", self.folder], "not a regular file")
        refused(["--recipe", "mxfp8", model, "--tensor", "nobody"], "nobody", "layer.0.weight")
        refused(["--recipe", "mxfp8", model, "--tensor", "ids"], "no float tensor")
        for name, data, word in (
                ("empty.npy", b"", "empty"), ("cut.npy", good[:-1], "truncated"),
                ("long.npy", good + b"x", "after its data"), ("text.txt", b"hello", "neither"),
                ("ints.npy", good.replace(b"<f4", b"<i4"), "<i4"),
                ("big.npy", good.replace(b"<f4", b">f4"), "big-endian"),
                ("lie.safetensors", struct.pack("<Q", 1 << 62) + b"{}", "at most"),
                ("ints.safetensors", safetensors({"i": ("I8", [1], b"1")}), "no tensor of")):
            refused(["--recipe", "mxfp8", self.path(name, data)], name, word)
        _, err = self.run_it("--recipe", "mxfp8", path, "--svg",
                             os.path.join(self.folder, "no", "p.svg"), code=2)
        self.assertIn("cannot be opened", err)


if __name__ == "__main__":
    unittest.main()
