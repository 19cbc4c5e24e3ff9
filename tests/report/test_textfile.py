import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo_batch.errors import OutputError
from echo_batch.report.metrics import Snapshot
from echo_batch.report.textfile import LAST_SUCCESS, MetricsTextfile


def read(path):
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_the_file_is_prometheus_text_with_the_fields_names(tmp_path):
    path = tmp_path / "echo.prom"
    snapshot = Snapshot(
        running=3, waiting=2, prefill_tokens=100, decode_tokens=50, host_pool_used=16, host_pool_tokens=64, rows_done=7,
        rows_failed=2, rows_total=9,
    )  # fmt: skip
    MetricsTextfile(path).write(snapshot)
    values = read(path)
    assert values["echo_batch:num_requests_running"] == 3
    assert values["echo_batch:num_requests_waiting"] == 2
    assert values["echo_batch:prompt_tokens_total"] == 100
    assert values["echo_batch:generation_tokens_total"] == 50
    assert values["echo_batch:kv_cache_usage_perc"] == 0.25
    assert values["echo_batch:gpu_pool_usage_perc"] == 0.0
    assert (values["echo_batch:request_success_total"], values["echo_batch:request_failed_total"]) == (5, 2)
    assert LAST_SUCCESS not in values
    assert [p.name for p in tmp_path.iterdir()] == ["echo.prom"]


def test_the_last_success_survives_the_next_job(tmp_path):
    path = tmp_path / "echo.prom"
    MetricsTextfile(path).write(Snapshot(), success_at=1_700_000_000.5)
    assert read(path)[LAST_SUCCESS] == 1_700_000_000.5
    following = MetricsTextfile(path)
    following.write(Snapshot(decode_tokens=1))
    assert read(path)[LAST_SUCCESS] == 1_700_000_000.5
    following.write(Snapshot(), success_at=1_800_000_000)
    assert read(path)[LAST_SUCCESS] == 1_800_000_000


def test_a_file_of_something_else_is_replaced_and_an_unwritable_place_is_73(tmp_path):
    path = tmp_path / "echo.prom"
    path.write_text("}}} not metrics\n")
    MetricsTextfile(path).write(Snapshot())
    assert "echo_batch:num_requests_running" in read(path)
    with pytest.raises(OutputError):
        MetricsTextfile(path / "below-a-file").write(Snapshot())
