import os
from dataclasses import replace

import pytest

from joulery.app.serving.service import objectives_from_config
from joulery.app.serving.site_watch import SiteWatch
from joulery.domain.errors import InfeasibleError
from tests.policies.serving.trial_world import trying
from tests.runtime.site_files import toy_site


def rewritten(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    stamp = path.stat()
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))


def test_a_file_that_stays_as_it_is_says_nothing(tmp_path):
    watch = SiteWatch(toy_site(tmp_path))
    assert watch.changed() == (None, "")


def test_a_tightened_slo_is_taken_over_once(tmp_path):
    path = toy_site(tmp_path)
    watch = SiteWatch(path)
    rewritten(path, "500 ms", "100 ms")
    site, remark = watch.changed()
    assert site.services[0].slo.latency_s == 0.1 and remark == ""
    assert watch.changed() == (None, "")


def test_what_cannot_change_without_a_restart_is_said(tmp_path):
    path = toy_site(tmp_path)
    watch = SiteWatch(path)
    rewritten(path, "lambda: 10 %", "lambda: 20 %")
    assert watch.changed()[1] == ""
    rewritten(path, "busy_s: 0.002", "busy_s: 0.003")
    site, remark = watch.changed()
    assert site is not None and "restart for the rest" in remark


def test_a_file_that_is_wrong_or_gone_changes_nothing(tmp_path):
    path = toy_site(tmp_path)
    watch = SiteWatch(path)
    rewritten(path, "500 ms", "500 apples")
    site, remark = watch.changed()
    assert site is None and "not taken over" in remark and "apples" in remark
    path.unlink()
    site, remark = watch.changed()
    assert site is None and "not taken over" in remark
    toy_site(tmp_path)
    assert watch.changed()[0] is not None


def test_an_accuracy_loss_is_carbon_alone_within_a_floor(tmp_path):
    site = SiteWatch(toy_site(tmp_path, changed={"lambda: 10 %": "accuracy_loss: 5 %"})).read
    asked = objectives_from_config(site.services[0], 0.8)
    assert (asked.lambda_ratio, asked.minimum_accuracy_ratio) == (1.0, pytest.approx(0.76))
    with pytest.raises(InfeasibleError):
        replace(trying(), objectives=objectives_from_config(site.services[0], 1.0))
