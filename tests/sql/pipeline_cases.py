"""Calls of the functions for pipelines that must be refused, besides those for their names."""

from tests.sql.error_cases import LEASE, Case

PIPELINE_CASES = [
    *(
        Case(60, "subscribe_from", ("ME", ["BOTH"], [0], timeout), {"argument": "timeout"})
        for timeout in (0, -1, None)
    ),
    *(
        Case(60, "stream_horizons", ("ME", ["BOTH"], None, rows), {"argument": "max_rows"})
        for rows in (0, -1)
    ),
    *(
        Case(63, "stream_horizons", ("ME", ["BOTH"], after), {"argument": "after", "value": after})
        for after in ("[]", "5", '{"BOTH":"x"}', '{"BOTH":99999999999999999999}', '{"BOTH":1.5}')
    ),
    *(
        Case(
            63, "subscribe_from", ("ME", ["BOTH"], positions, 60),
            {"argument": "positions", "value": text},
        )
        for positions, text in (
            ([], "{}"), ([1, 2], "{1,2}"), ([-1], "{-1}"), ([None], "{NULL}"), (None, "null"),
        )
    ),
    *(Case(1, name, ("ME", topics, *more)) for topics in ([], None) for name, more in (
        ("stream_horizons", ()), ("subscribe_from", ([], 60)),
    )),
    Case(9, "subscribe_from", ("ME", ["BO*"], [0], 60), {"topic": "BO*"}),
    *(
        Case(63, "renew", ("ME", "QBOTH", 5.0, lease), {"argument": "lease", "value": lease})
        for lease in ("", "junk", "5", LEASE + "0")
    ),
    *(
        Case(60, "renew", ("ME", "QBOTH", duration, LEASE), {"argument": "duration"})
        for duration in (0.0, -1.0, None)
    ),
    Case(58, "renew", ("ME", "QBOTH", 5.0, [LEASE] * 4097), {"limit": "4096 leases"}),
    *(
        Case(number, name, ("ME", dest, query, batch, [], rows), values)
        for name, dest in (("publish_staged", "BOTH"), ("push_staged", "QBOTH"))
        for number, query, batch, rows, values in (
            (54, "", 0, 0, {}),
            (54, "q" * 201, 0, 0, {}),
            (63, "query", None, 0, {"argument": "batch", "value": "null"}),
            (63, "query", -1, 0, {"argument": "batch", "value": "-1"}),
            (64, "query", 0, 5, {"n": 0, "m": 5}),
            (64, "query", 0, None, {"n": 0, "m": "null"}),
        )
    ),
    *(
        Case(63, "unstage", (staging,), {"argument": "staging", "value": staging})
        for staging in ("", "junk", LEASE)
    ),
]  # fmt: skip
