"""States that a short fleet does not reach: a task in rounds, everything that needs an operator, a thousand devices."""

import contextlib
import random
import time
from pathlib import Path

from msgspec.structs import replace

from aggregator.algorithms.fpl import FPL
from aggregator.config.limits import Limits
from aggregator.config.schema import Rounds
from aggregator.coordination.rollout_state import State, Trial
from aggregator.storage import stop_reason
from aggregator.storage.heads import TrainingProgress
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.stop_reason import StopReason
from aggregator.storage.stored_values import LostFiles
from aggregator.sums.stored_lists import put_sums, sums_of
from protocol.wire.messages import BlobRef
from protocol.wire.presence import Duplicate
from tests.browser.conftest import OpenPage
from tests.browser.large_fleet import add_device, large_store, operate
from tests.browser.test_accessibility import on_screens
from tests.support.messages.heads import evaluate, plan_head
from tests.support.messages.submissions import TASK, device_info
from tests.unit.aggregator.http.servers import serving
from tests.unit.aggregator.status.stores import (
    TASK_FILE,
    add_head,
    busy_store,
    private_store,
    started_store,
    submission_row,
)


def test_round_shows_who_is_in_and_who_is_missing(open_page: OpenPage, tmp_path: Path) -> None:
    task = replace(TASK_FILE, algorithm="fpl", fpl=FPL(rounds=2), rounds=Rounds(min_devices=1))
    with contextlib.closing(started_store(tmp_path, task)) as store:
        tensors = BlobRef(digest=bytes(32), size_bytes=1, name="tensors-1")
        add_head(store, 1, tensors=tensors, a=b"a".hex(), b=b"b".hex())
        store.submissions.put(TASK, submission_row("a", {0: 1, 2: 1}, 200.0, number=1))
        store.submissions.put(TASK, submission_row("b", {0: 1}, number=0))
        store.devices.put_info("c", device_info(problem="no room"), now_s=11.0)
        store.devices.put_info("d", device_info(problem="no class"), now_s=11.0)
        store.devices.put_info("a", device_info(warning="cat has 0 of 61"), now_s=11.0)
        store.devices.raise_epsilon("a", 2.5)
        with serving(tmp_path) as (client, _):
            dashboard = open_page(client.origin)
            dashboard.wait_for_text("#collection h2", "Round")
            dashboard.wait_for_text("#collection", "Round 1 of 2: 1 of 2 submissions")
            lines = dashboard.page.locator("#collection .names").all_inner_texts()
            assert lines == ["In: a", "Earlier submission counts: b", "Missing: b, c, d"]
            dashboard.wait_for_text(".figure", "Greatest epsilon")
            dashboard.wait_for_text(".alarms", "2 devices cannot take part: c: no room; also d")
            dashboard.wait_for_text(".alarms", "1 device with a warning: a: cat has 0 of 61")
            dashboard.server_stops = True


def test_everything_that_needs_an_operator_is_at_the_top(open_page: OpenPage, tmp_path: Path) -> None:
    """Each with its reason; and a candidate with what its canaries found."""
    with contextlib.closing(busy_store(tmp_path)) as store:
        now_s = time.time()
        served = store.served_task()
        store.facts.put(replace(served, limits=Limits(max_devices=1)))
        store.keys.pin("a", bytes(32), now_s=now_s)
        stop_reason.create(tmp_path)
        stop_reason.write(tmp_path, StopReason(now_s, "no space left on the disk: free space"))
        store.facts.put(Duplicate(instance="aa", epoch=1, address="other/192.0.2.1", seen_s=now_s))
        store.facts.put(LostFiles(("ab" * 32,)))
        plan_head(
            *(store, 4),
            progress=TrainingProgress(version=4, epoch=3, epochs=15),
            failures=2,
            problem="out of memory",
            failed_s=now_s,
            retry_s=store.clock.now_s() + 60,
        )
        store.submissions.add_lost(TASK, "lost", b"digest", now_s=now_s)
        store.quarantine.add(TASK, "a", reason="far from the others", now_s=now_s)
        add_head(store, 2)
        add_head(store, 3)
        evaluate(store, "a", 3, correct=8, previous=9)
        trial = Trial(3, 70.0, ("a", "idle"), 2**32)
        rejected = {2: "worse by 5 points"}
        store.heads.put_rollout(TASK, State(newest=3, current=1, trial=trial, rejected=rejected))
        with serving(tmp_path) as (client, _):
            dashboard = open_page(client.origin)
            for text in (
                "no space left on the disk",
                "a program with the same key ran at other/192.0.2.1",
                "File lost: abab",
                "Training failed: head 4, 2 times, last at ",
                "out of memory; repeated by ",
                "Submission lost: of lost: damaged on disk",
                "1 device quarantined: a",
                "Quota nearly used up: 1 of 1 devices (limits.max_devices)",
            ):
                dashboard.wait_for_text(".alarms li", text)
            dashboard.wait_for_text(".figure", "Quota of devices")
            dashboard.wait_for_text("#collection", "new submission")
            dashboard.wait_for_text(".figure", "images")
            dashboard.wait_for_text("#collection .names", "Submissions of: ")
            dashboard.wait_for_text("#collection", "Training head 4: epoch 3 of 15")
            dashboard.wait_for_text("#devices .flag", "quarantined: far from the others")
            dashboard.wait_for_text("#heads .note", "Head 3 is tried by 2 canary devices; waiting for idle.")
            dashboard.wait_for_text("#heads tr", "worse by 5 points")
            dashboard.page.get_by_role("button", name="Promote head 3").wait_for()
            assert not dashboard.violations()
            dashboard.server_stops = True


def test_revoked_device_counts_nowhere_in_coverage(open_page: OpenPage, tmp_path: Path) -> None:
    """And cannot be released; and the fleet that it leaves is smaller than its quorum."""
    with contextlib.closing(busy_store(tmp_path)) as store:
        for device in "ab":
            store.keys.enroll(device, bytes(32), now_s=1.0)
        store.keys.close_fleet()
        store.keys.revoke("a", now_s=2.0)
        store.quarantine.add(TASK, "a", reason=REVOKED, now_s=2.0)
        store.quarantine.add(TASK, "b", reason="far from the others", now_s=2.0)
        store.devices.put_info("b", device_info(images={"cat": 7}), now_s=11.0)
        store.heads.put_rollout(TASK, State(newest=1, current=1))
        store.facts.put(replace(store.served_task(), settings=replace(TASK_FILE, retrain_after=2).settings))
        with serving(tmp_path) as (client, _):
            dashboard = open_page(client.origin)
            dashboard.wait_for_text(".alarms li", "retrain_after 2 cannot be reached: 1 device is enrolled")
            dashboard.wait_for_text(".alarms li", "1 device quarantined: b")
            dashboard.wait_for_text("#coverage tbody tr", "cat")
            rows = dashboard.page.locator("#coverage tbody tr").all_inner_texts()
            assert [row.split() for row in rows][::2] == [["cat", "7", "3", "1"], ["fox", "0", "0", "none"]]
            dashboard.page.evaluate(
                "() => { const paint = CanvasRenderingContext2D.prototype.fillText; window.texts = [];"
                "CanvasRenderingContext2D.prototype.fillText = function (...given) "
                "{ window.texts.push(`${given[0]}`); paint.apply(this, given); } }"
            )
            dashboard.page.get_by_label("Show").select_option("prototypes")
            dashboard.wait("window.texts.includes('3')")
            texts = dashboard.evaluate("() => window.texts")
            assert "b" in texts
            assert not {"a", "6", "4"} & set(texts)
            assert dashboard.page.get_by_role("button", name="Release").all_inner_texts() == ["Release\nb"]
            dashboard.server_stops = True


def test_accuracy_axis_fits_its_lines(open_page: OpenPage, tmp_path: Path) -> None:
    """Its legend has the newest head's figures, and each bar the names of its devices."""
    with contextlib.closing(busy_store(tmp_path)) as store, serving(tmp_path) as (client, _):
        store.heads.put_rollout(TASK, State(newest=1, current=1))
        dashboard = open_page(client.origin)
        dashboard.wait_for_text("#accuracy .u-legend", "90.0 %")
        scale = "document.querySelector('#accuracy .chart').chart.scales.y"
        scale_of = f"() => [{scale}.min, {scale}.max]"
        assert dashboard.evaluate(scale_of) == [0.7, 1]
        dashboard.wait_for_text("#accuracy .bars li", "1: a")
        dashboard.server_stops = True


@on_screens
def test_privacy_panel(open_page: OpenPage, tmp_path: Path, scheme: str, screen: dict[str, object]) -> None:
    """Budget, sums, and who holds which key; the reason of a refused list; fitting a phone."""
    with contextlib.closing(private_store(tmp_path)) as store, serving(tmp_path) as (client, _):
        dashboard = open_page(client.origin, color_scheme=scheme, **screen)
        dashboard.wait_for_text("nav a", "Privacy")
        dashboard.wait_for_text("#privacy tbody", "0 enrolled, 7 stored at first use")
        figures = dashboard.page.locator("#privacy .figure").all_inner_texts()
        assert [" ".join(figure.split()).partition(" since")[0] for figure in figures] == [
            "Epsilon of a submission 2 of one image; delta 0.00001, conditional",
            "Epsilon of a device ≤ 4 of all its submissions, conditional",
            "Local epsilon 2.00 to both operators; conditional ones need an honest second operator",
            "Greatest epsilon spent 3.60 1 device near the limit, conditional",
            "Devices in a sum ≥ 2 25 % may add no noise",
            "Devices opened 2 in 1 list, and 2 in no head",
            "Devices requested 2",
            "Devices waiting 1 in no list",
        ]
        keys = dashboard.page.locator("#privacy code[title]").all_inner_texts()
        assert keys == ["c" * 16, b"b".hex() * 8, b"a".hex() * 8]
        lists = sums_of(store.facts, TASK)
        assert lists.pending is not None
        put_sums(store.facts, replace(lists, pending=replace(lists.pending, problem="e is not listed")))
        dashboard.wait_for_text("#privacy .problem", "The second operator opens no sum: e is not listed")
        assert not dashboard.violations()
        if screen:
            assert dashboard.page.evaluate("document.documentElement.scrollWidth") == 390
        dashboard.server_stops = True


MAX_ELEMENTS = 5_000
"""Of the page; with a row of each device there would be some 20,000."""


def test_page_does_not_grow_with_the_fleet(open_page: OpenPage, tmp_path: Path) -> None:
    """While a device joins, and while the operator sorts, filters, scrolls and turns the page."""
    with contextlib.closing(large_store(tmp_path, 1000)) as store, serving(tmp_path) as (client, _):
        dashboard = open_page(client.origin)
        dashboard.wait_for_text("#devices", "1,000 devices")
        add_device(store, "new", random.Random(1))
        dashboard.wait_for_text("#devices", "1,001 devices")
        operate(dashboard.page)
        dashboard.page.get_by_label("Filter").fill("")
        dashboard.wait_for_text("#devices", "1,001 devices")
        assert dashboard.page.locator("*").count() < MAX_ELEMENTS
        dashboard.server_stops = True
