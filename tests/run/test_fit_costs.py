"""Least squares of costs."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.run.fit_costs import fit_costs, slower


def test_costs_add_up_to_the_time_that_was_measured_also_where_some_spans_are_very_slow() -> None:
    rng = np.random.default_rng(0)
    columns_NP = np.column_stack([rng.integers(10, 60, 300), rng.integers(50, 900, 300)]).astype(float)
    shares_N = rng.random(300)
    true_N = columns_NP @ np.array([4e-3, 4e-5]) * slower(1.5, shares_N)
    fit = fit_costs(columns_NP, true_N * rng.lognormal(-0.5, 1.0, 300), shares_N)
    found_N = columns_NP @ np.array(fit.values) * slower(fit.ratio, shares_N)
    assert found_N.sum() == pytest.approx(true_N.sum(), rel=0.15)
    exact = fit_costs(columns_NP, true_N, shares_N)
    assert (*exact.values, exact.ratio) == pytest.approx((4e-3, 4e-5, 1.5), rel=1e-2)
