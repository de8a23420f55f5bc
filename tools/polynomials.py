#!/usr/bin/env python3
"""Computes the minimax coefficients of src/expr/words.h, src/expr/hardware.h and
src/backend/cpu/jit/exp2.h and prints them in the same format.

Each table approximates g(x) by a polynomial in y(x). A linear program minimises the largest
w(x)*|polynomial - g| on a grid that is dense at the ends. w converts an error of the polynomial to
a relative error of the function. The coefficients are then rounded to fp32 one by one, lowest order
first. After each rounding, the remaining coefficients are fitted again. The printed error is for
the rounded coefficients on a finer grid, in exact arithmetic.

A quotient of polynomials is found by iteration: with the denominator of the last round in the
weight, the error is linear in all coefficients. They are positive and rounded at once.
"""

import mpmath as mp
import numpy as np
from scipy.optimize import linprog

mp.mp.dps = 40


def grid(lo, hi, count):
    middle, radius = (lo + hi) / 2, (hi - lo) / 2
    nodes = [middle - radius * mp.cos(mp.pi * (i + 0.5) / count) for i in range(count)]
    return [x for x in nodes if x != 0]


def residual(table, coefficients, xs):
    """w*(g - polynomial) at the points xs, and the basis w*y^k."""
    rows = []
    errors = []
    for x in xs:
        y, w = mp.mpf(table.y(x)), table.w(x)
        powers = [w * y**k for k in range(table.terms)]
        rows.append([float(p) for p in powers])
        errors.append(float(w * table.g(x) - mp.fdot(powers, coefficients)))
    return np.array(errors), np.array(rows)


def correction(errors, basis):
    """The change of the free coefficients that minimises the largest |errors - basis @ change|."""
    scale, columns = np.abs(errors).max(), np.abs(basis).max(axis=0)
    a = basis / columns
    ones = np.ones((len(errors), 1))
    result = linprog(
        np.append(np.zeros(a.shape[1]), 1.0),
        A_ub=np.vstack([np.hstack([a, -ones]), np.hstack([-a, -ones])]),
        b_ub=np.concatenate([errors, -errors]) / scale,
        bounds=[(None, None)] * a.shape[1] + [(0, None)],
        method="highs",
    )
    return result.x[:-1] * scale / columns


class Table:
    def __init__(self, name, form, terms, lo, hi, g, w, y=lambda x: x, fixed=()):
        self.name, self.form, self.terms, self.fixed = name, form, terms, fixed
        self.lo, self.hi = mp.mpf(lo), mp.mpf(hi)
        self.g, self.w, self.y = g, w, y

    def solve(self):
        xs = grid(self.lo, self.hi, 24 * self.terms + 40)
        c = [mp.mpf(v) for v in self.fixed] + [mp.mpf(0)] * (self.terms - len(self.fixed))
        for first in range(len(self.fixed), self.terms):
            for _ in range(4 if first == len(self.fixed) else 1):
                errors, basis = residual(self, c, xs)
                for k, d in enumerate(correction(errors, basis[:, first:])):
                    c[first + k] += mp.mpf(d)
            c[first] = mp.mpf(float(np.float32(float(c[first]))))
        errors, _ = residual(self, c, grid(self.lo, self.hi, 997))
        return [float(v) for v in c], np.abs(errors).max()


def hex_float(v):
    mantissa, exponent = float(v).hex().split("p")
    return mantissa.rstrip("0").rstrip(".") + "p" + exponent + "f"


def square(x):
    return x * x


def scaled_erfc(x):
    return mp.exp(x * x) * mp.erfc(x)


class Quotient:
    """g(x) by over(y)/under(y). The highest coefficient of `under` is 1. At the end of the grid,
    `last` is approximated too."""

    def __init__(self, name, form, over, under, lo, hi, g, y=lambda x: x, last=None):
        self.names, self.form = (name + "Over", name + "Under"), form
        self.over, self.under = over, under
        self.lo, self.hi, self.g, self.y, self.last = mp.mpf(lo), mp.mpf(hi), g, y, last

    def samples(self, count):
        xs = grid(self.lo, self.hi, count) + [self.hi]
        g = [float(self.g(x)) for x in xs]
        if self.last is not None:
            xs, g = xs + [self.hi], g + [float(self.last)]
        return np.array([float(self.y(x)) for x in xs]), np.array(g)

    def solve(self):
        y, g = self.samples(400)
        top = np.vander(y, self.over, increasing=True)
        bottom = np.vander(y, self.under + 1, increasing=True)[:, 1:]
        values = np.ones(len(y))
        best = (np.inf, None, None)
        for _ in range(60):
            basis = np.hstack([top / g[:, None], -bottom]) / values[:, None]
            c = correction(1 / values, basis)
            values = 1 + bottom @ c[self.over:]
            error = np.abs(top @ c[:self.over] / values / g - 1).max()
            if error < best[0]:
                best = (error, c[:self.over] / c[-1], np.append(1, c[self.over:-1]) / c[-1])
        over, under = (np.float32(v).astype(float) for v in best[1:])
        y, g = self.samples(997)
        exact = np.polyval(over[::-1], y) / np.polyval(np.append(under, 1)[::-1], y)
        return [list(over), list(under)], np.abs(exact / g - 1).max()


HALF_LN2 = mp.log(2) / 2 * mp.mpf("1.0001")
ROOT = mp.sqrt(2)
ERF_SMALL = mp.mpf("0.375")  # kErfSmall


def exp_table(terms):
    return Table("kExp", "exp(r) = 1 + r + r^2 p(r)", terms, -HALF_LN2, HALF_LN2,
                 lambda r: (mp.expm1(r) - r) / r**2, lambda r: r**2 / mp.exp(r))


def exp2_table(name, terms, lo, hi, times=1):
    return Table(name, "2^f = p(f)" if times == 1 else f"{times} 2^f = p(f)", terms, lo, hi,
                 lambda f: times * mp.mpf(2)**f, lambda f: mp.mpf(2)**-f / times)


def expm1_table(terms):
    return Table("kExpm1", "expm1(r) = r + r^2 p(r)", terms, -HALF_LN2, HALF_LN2,
                 lambda r: (mp.expm1(r) - r) / r**2, lambda r: r**2 / mp.expm1(r))


def log_table(terms):
    return Table("kLog", "log(1 + f) = f + f^2 p(f)", terms, 1 / ROOT - 1, ROOT - 1,
                 lambda f: (mp.log1p(f) - f) / f**2, lambda f: f**2 / mp.log1p(f))


def tanh_table(terms, hi):
    return Table("kTanh", "tanh(x) = x p(x^2)", terms, 0, hi,
                 lambda x: mp.tanh(x) / x, lambda x: x / mp.tanh(x), square, fixed=[1])


def erf_table(terms):
    return Table("kErf", "erf(x) = x + x p(x^2)", terms, 0, ERF_SMALL,
                 lambda x: mp.erf(x) / x - 1, lambda x: x / mp.erf(x), square)


def erf_tail_table(terms):
    return Table("kErfTail", "erf(x) = 1 - exp(p(x))", terms, ERF_SMALL, 4,
                 lambda x: mp.log(mp.erfc(x)), lambda x: mp.erfc(x) / mp.erf(x))


def erfc_tail_table(terms, shift, centre):
    def u(x):
        return 1 / (x + mp.mpf(shift))

    return Table("kErfcTail", "erfc(x) = exp(-x^2) (u + u p(u - centre)), u = 1/(x + shift)",
                 terms, ERF_SMALL, mp.mpf("10.1"),
                 lambda x: scaled_erfc(x) / u(x) - 1, lambda x: u(x) / scaled_erfc(x),
                 lambda x: u(x) - mp.mpf(centre))


def tanh_quotient(over, under, hi):
    hi = mp.mpf(hi)
    return Quotient("kTanh", "tanh(x) = x p(x^2) / q(x^2) up to kTanhHigh, then 1", over, under,
                    "1e-6", hi, lambda x: mp.tanh(x) / x, square, last=1 / hi)


def erfc_quotient(over, under):
    return Quotient("kErfc", "erfc(x) = exp(-x^2) p(x) / q(x)", over, under, 0, "10.15", scaled_erfc)


def log1p_table(terms):
    return Table("kLog1p", "log1p(x) = x p(x) on [0, 1]", terms, 0, 1,
                 lambda x: mp.log1p(x) / x, lambda x: x / mp.log1p(x))


TABLES = {
    "StrictTables": [
        exp_table(5),
        expm1_table(5),
        log_table(8),
        tanh_table(5, hi="0.55"),
        erf_table(4),
        erf_tail_table(7),
        erfc_tail_table(9, shift="2", centre="0.15625"),
    ],
    "exp2.h": [
        exp2_table("kExp2Rough", 4, 0, 1),
        exp2_table("kExp2", 6, 0, 1),
        exp2_table("kExp2Twice", 6, -0.5, 0.5, times=2),
    ],
    "ExactTables": [
        erfc_quotient(5, 5),
        log1p_table(10),
    ],
    "HardwareTables": [
        tanh_quotient(3, 3, hi=6),
        erfc_quotient(4, 4),
        log1p_table(7),
    ],
    "HardwareTables<true>": [
        tanh_quotient(3, 2, hi="4.9"),
        erfc_quotient(3, 3),
        log1p_table(5),
    ],
    "NativeTables": [
        exp_table(3),
        expm1_table(4),
        log_table(5),
        tanh_table(3, hi="0.4"),
        erf_table(3),
        erf_tail_table(5),
        erfc_tail_table(6, shift="2.25", centre="0.15625"),
    ],
}


def print_table(table):
    coefficients, error = table.solve()
    print(f"  // {table.form}: 2^{np.log2(error):.1f}")
    if isinstance(table, Quotient):
        for name, values in zip(table.names, coefficients):
            print(f"  static constexpr std::array {name}{{{', '.join(map(hex_float, values))}}};")
        return
    line = f"  static constexpr float {table.name}[] = {{"
    for i, c in enumerate(coefficients):
        item = hex_float(c) + ("," if i + 1 < table.terms else "};")
        if len(line + item) > 100:
            print(line.rstrip())
            line = " " * 6
        line += item + " "
    print(line.rstrip())


def main():
    for name, tables in TABLES.items():
        print(f"struct {name}:")
        for table in tables:
            print_table(table)


if __name__ == "__main__":
    main()
