"""What a sweep reports: the rate is chosen on validation data, and every table says what it holds."""

import pytest

from linattn_cli import capacity_report as report
from linattn_cli.capacity import cells_of
from linattn_cli.capacity_cell import Outcome
from linattn_cli.capacity_store import COLUMNS, SweepFolder
from linattn_cli.settings import RunConfig, SweepConfig


@pytest.fixture
def rows(tmp_path):
    """Rows of a database whose cells reached what a function of the cell says."""

    def make(reach, **lists):
        config = RunConfig(sweep=SweepConfig(**lists))
        with SweepFolder.create(tmp_path / "sweep", config) as folder:
            for cell in folder.add(cells_of(config)):
                found = reach(cell)
                if found is None:
                    continue
                figures = {
                    "parameters": 10,
                    "state_bytes": 8,
                    "steps": 5,
                    "train_s": 1.0,
                    "chance_pairs": 0.25,
                    **found,
                }
                error = {"type": "x", "message": "why"} if "status" in found else None
                outcome: Outcome = {
                    "status": found.get("status", "finished"),
                    "figures": figures,
                    "metrics": [],
                    "files": {},
                    "error": error,
                }
                folder.record(cell, outcome, attempts=1, env={})
            return folder.rows()

    return make


def by_rate(table):
    return lambda cell: table[cell.config.train.lr]


def test_the_rate_is_chosen_on_validation_data_and_reported_on_held_out_data(rows):
    found = report.groups(
        rows(
            by_rate(
                {
                    1e-3: {"validation_accuracy": 0.8, "validation_loss": 1.0, "accuracy": 0.99},
                    3e-3: {"validation_accuracy": 0.9, "validation_loss": 1.0, "accuracy": 0.7},
                }
            ),
            lrs=[1e-3, 3e-3],
        )
    )
    assert [(row["lr"], row["accuracy_mean"], row["lrs"]) for row in found] == [(3e-3, 0.7, 2)]


def test_equal_accuracies_are_told_apart_by_the_validation_loss(rows):
    figures = {"validation_accuracy": 1.0, "accuracy": 1.0}
    table = {lr: {**figures, "validation_loss": loss} for lr, loss in ((1e-3, 0.2), (3e-3, 0.1), (1e-2, 0.3))}
    (found,) = report.groups(rows(by_rate(table), lrs=list(table)))
    assert found["lr"] == 3e-3


def test_mean_least_and_largest_are_over_the_seeds_of_one_rate(rows):
    def reach(cell):
        value = 0.2 * cell.config.seed + (0.5 if cell.config.train.lr == 3e-3 else 0.0)
        return {"accuracy": value, "validation_accuracy": value, "validation_loss": 1.0}

    (found,) = report.groups(rows(reach, lrs=[1e-3, 3e-3], seeds=[0, 1, 2]))
    assert found["seeds"] == 3
    spread = [found[f"accuracy_{name}"] for name in ("mean", "min", "max")]
    assert spread == pytest.approx([0.7, 0.5, 0.9])


def test_a_diverged_seed_counts_against_its_rate(rows):
    def reach(cell):
        if cell.config.train.lr == 1e-2 and cell.config.seed == 1:
            return {"status": "diverged"}
        value = {1e-3: 0.6, 1e-2: 0.9}[cell.config.train.lr]
        return {"accuracy": value, "validation_accuracy": value, "validation_loss": 1.0}

    (found,) = report.groups(rows(reach, lrs=[1e-3, 1e-2], seeds=[0, 1]))
    assert (found["lr"], found["diverged"]) == (1e-3, 0), "0.6 on both seeds beats 0.9 on one of two"


def test_where_all_diverge_the_table_says_so(rows):
    found = report.groups(rows(lambda cell: {"status": "diverged"}, seeds=[0, 1]))
    assert found[0]["accuracy_mean"] is None
    assert report.pivot(found)[1][0]["8"] == "diverged"


def test_rates_with_fewer_seeds_are_not_compared(rows):
    """A sweep in progress must not prefer a rate for its one lucky seed."""

    def reach(cell):
        if cell.config.train.lr == 1e-2 and cell.config.seed == 1:
            return None  # still to run
        value = {1e-3: 0.6, 1e-2: 0.9}[cell.config.train.lr]
        return {"accuracy": value, "validation_accuracy": value, "validation_loss": 1.0}

    (found,) = report.groups(rows(reach, lrs=[1e-3, 1e-2], seeds=[0, 1]))
    assert (found["lr"], found["seeds"], found["missing"]) == (1e-3, 2, 1)


def reached(value=0.5):
    return {"accuracy": value, "validation_accuracy": value, "validation_loss": 1.0}


def test_the_small_table_is_models_by_pairs(rows):
    found = report.groups(
        rows(lambda cell: reached(1 / cell.place["n_pairs"]), models=["linear", "vla"], n_pairs=[4, 8], seeds=[0])
    )
    across, table = report.pivot(found)
    assert across == "n_pairs"
    assert table == [
        {"model": "linear", "seeds": "1", "4": "0.2500", "8": "0.1250"},
        {"model": "vla", "seeds": "1", "4": "0.2500", "8": "0.1250"},
    ]


def test_several_seeds_are_shown_with_their_range(rows):
    def reach(cell):
        return reached(0.5 + 0.25 * cell.config.seed)

    found = report.groups(rows(reach, n_pairs=[4, 8], seeds=[0, 1], more=[{"n_pairs": [8], "seeds": [2]}]))
    _, (line,) = report.pivot(found)
    assert line["4"] == "0.6250 [0.5000, 0.7500]"
    assert line["8"] == "0.7500 [0.5000, 1.0000]"
    assert line["seeds"] == "2, 3"


def test_nearly_one_is_not_shown_as_one(rows):
    _, (line,) = report.pivot(report.groups(rows(lambda cell: reached(0.99999))))
    assert line["8"] == "0.99999"


@pytest.mark.parametrize(
    ("lists", "across", "columns", "beside"),
    [
        ({"seq_lens": [49, 100]}, "seq_len", ["49", "100"], []),
        ({"grid": {"task.updates": [0, 4]}}, "updates", ["0", "4"], []),
        ({"d_heads": [8, 16]}, "d_head", ["8", "16"], []),
        ({"n_pairs": [4, 8], "d_heads": [8, 16]}, "n_pairs", ["4", "8"], ["d_head"]),
        ({"n_pairs": [4, 8], "grid": {"model.d_model": [64, 128]}}, "n_pairs", ["4", "8"], ["d_model"]),
        ({"n_pairs": [4, 8], "grid": {"task.updates": [0, 4]}}, "n_pairs", ["4", "8"], ["updates"]),
        (
            {"points": [{"task.n_pairs": n, "task.seq_len": t} for n, t in ((4, 64), (8, 128))]},
            "n_pairs",
            ["4", "8"],
            [],
        ),
    ],
)
def test_what_varies_is_a_column_or_beside_the_model(rows, lists, across, columns, beside):
    found = report.groups(rows(lambda cell: reached(), **lists))
    name, table = report.pivot(found)
    assert name == across
    assert list(table[0]) == ["model", *beside, "seeds", *columns]


def test_what_the_model_decides_is_no_column(rows):
    """Variants that differ in a setting are told apart by their name already."""
    found = rows(lambda cell: reached(), variants={"short": {"model.short_conv": 4}, "plain": {"model.short_conv": 0}})
    assert report.further_settings(found) == {}
    assert [line["model"] for line in report.pivot(report.groups(found))[1]] == ["short", "plain"]


def test_the_rows_name_what_varies_and_hide_nothing_reached(rows):
    found = report.result_rows(rows(lambda cell: reached(), grid={"model.d_model": [64, 128]}))
    assert list(found[0])[:8] == ["model", "n_pairs", "d_head", "seq_len", "d_model", "lr", "seed", "accuracy"]
    assert {"validation_accuracy", "parameters", "state_bytes", "steps", "status", "error", "run"} <= set(found[0])
    assert set(found[0]) <= set(COLUMNS)


def test_a_table_at_one_rate_leaves_out_groups_without_it(rows):
    found = rows(
        lambda cell: reached(cell.config.train.lr), n_pairs=[4], lrs=[0.1, 0.2], more=[{"n_pairs": [8], "lrs": [0.2]}]
    )
    assert [(row["n_pairs"], row["accuracy_mean"]) for row in report.groups_at(found, 0.1)] == [(4, 0.1)]


def drawn(path, found):
    from linattn_cli import plotting
    from linattn_cli.capacity_plot import picture

    config = RunConfig().model_dump(mode="json")
    plotting.save(path, picture(config, {"device_name": "a CPU"}, found))
    return plotting.svgs(picture(config, {}, found), "p")


def test_the_plot_has_a_line_a_model(rows, tmp_path):
    found = report.groups(rows(lambda cell: reached(), models=["softmax", "vla"], n_pairs=[4, 8], seeds=[0, 1]))
    (_, across), (_, size) = drawn(tmp_path / "plot.png", found)
    assert (tmp_path / "plot.png").stat().st_size > 5000
    for text in ("key-value pairs (n_pairs)", ">softmax<", ">vla<", "1/n_pairs"):
        assert text in across
    assert "KiB" in size


def test_a_plot_of_nothing_finished_is_still_a_plot(rows, tmp_path):
    assert len(drawn(tmp_path / "plot.png", report.groups(rows(lambda cell: None)))) == 2
