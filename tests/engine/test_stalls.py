"""An exchange that waits is mentioned once; one that ends in time, or by itself, never."""

from __future__ import annotations

import re
import time

import pytest

from thinwire.engine.stalls import StallWatch


@pytest.fixture
def watch():
    # Half a second is mentioned: a machine that is busy may take longer over nothing than a tenth.
    watch = StallWatch(timeout=5.0)
    yield watch
    watch.close()


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_long_wait_is_mentioned_once(watch, caplog):
    with watch.watching(lambda: "the exchange of parcels"):
        wait_for(lambda: said(caplog))
        time.sleep(0.6)
    (sentence,) = said(caplog)
    assert re.match(r"the exchange of parcels has waited for \d+ s", sentence)


def test_an_exchange_that_ends_by_itself_is_asked_and_never_mentioned(watch, caplog):
    asked = []
    watch.begin(lambda: "the exchange of parcels", lambda: asked.append(1) is None)
    wait_for(lambda: asked)
    with watch.watching(lambda: "another one"):
        pass
    time.sleep(0.7)
    assert said(caplog) == []


def test_an_error_ends_the_watch_too(watch, caplog):
    with pytest.raises(ValueError, match="lost"), watch.watching(lambda: "the exchange of parcels"):
        raise ValueError("lost")
    time.sleep(0.7)
    assert said(caplog) == []
