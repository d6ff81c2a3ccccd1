"""``vopt show`` and the answer of a search, as blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vopt.optimizer.history import Stage
from vopt.optimizer.recommend import Importance, Recommendation, Verdict
from vopt.optimizer.report import wording
from vopt.optimizer.report.blocks import Block, Code, Column, Facts, Line, Table, TableMaker, Tone
from vopt.optimizer.report.load_said import load_said
from vopt.optimizer.report.shell import exported_variables
from vopt.optimizer.report.spent import spent
from vopt.optimizer.report.view import Comparison, Spread, StudyView
from vopt.optimizer.trial import Phase
from vopt.optimizer.way_on import USUAL, with_storage

_REASON_WIDTH = 110
_VERDICT_TONES = {
    Verdict.BETTER: Tone.GOOD,
    Verdict.NO_GAIN: Tone.PLAIN,
    Verdict.NOTHING_FEASIBLE: Tone.BAD,
    Verdict.UNCONFIRMED: Tone.WARN,
}


def list_blocks(views: Sequence[StudyView]) -> list[Block]:
    """All studies, newest last."""
    if not views:
        return [Line("No studies here yet. vopt search --goal throughput --model MODEL makes one.")]
    columns = (Column("Study"), Column("Begun"), Column("Goal"), Column("Starts", right=True), Column("Answer", wide=True))
    table = TableMaker("Studies", columns)
    for view in views:
        tone = _VERDICT_TONES[view.verdict] if view.verdict else Tone.DIM
        answer = view.verdict_line() if view.answer else "no answer yet"
        begun = view.record.created_at.replace("T", " ").removesuffix("Z")[:16]
        table.add(view.name, begun, str(view.goal.get("name", "")), str(len(view.trials)), answer, tone=tone)
    return [table.done()]


def answer_blocks(view: StudyView, storage: str = USUAL) -> list[Block]:
    """What a search says at its end: verdict, gain, smallest visible gain, costs, what was rejected and why. The command is
    not in it: it goes to standard output. ``storage``: where the lines to type find the study."""
    answer = view.answer
    if answer is None:
        return [Line(view.verdict_line())]
    facts = [("Why", answer.reason)] if answer.verdict is not Verdict.NOTHING_FEASIBLE else []
    facts += _gain_facts(view, answer)
    if view.trials:
        facts.append(("Time", spent(view.trials, simulated=view.simulated).text))
    blocks: list[Block] = [verdict_block(view), Facts(tuple(facts))]
    if answer.front:
        blocks.append(front_table(view, answer))
    if answer.rejected:
        blocks.append(rejected_table(view))
    if answer.verdict is Verdict.NOTHING_FEASIBLE:
        blocks.append(Line("\nThere is no command to run. A wider limit, a shorter workload or another model may have one."))
    else:
        page, script = (with_storage(f"vopt {verb} {view.name}", storage) for verb in ("report", "export"))
        blocks.append(Line(f"\n{page} makes a page of it, {script} a script.", Tone.DIM))
    return blocks


def study_blocks(view: StudyView, importance: Importance | None = None) -> list[Block]:
    """One study in full."""
    answer = view.answer
    blocks: list[Block] = [verdict_block(view)]
    if answer and answer.verdict is not Verdict.NOTHING_FEASIBLE:
        blocks.append(Line(answer.reason, Tone.DIM))
    blocks.append(Facts(tuple(_setup_facts(view))))
    if answer and answer.argv is not None:
        blocks.append(Code(wording.command_lines(answer.argv, exported_variables(view))))
    if answer or view.notes:
        blocks.append(Facts(tuple(_gain_facts(view, answer) if answer else _notes(view))))
    if answer and answer.front:
        blocks.append(front_table(view, answer))
    if rows := view.compared():
        blocks.append(comparison_table(rows, view.challenger))
    if answer and answer.overrides:
        blocks.append(override_table(view, answer))
    if (finalists := finalist_table(view)).rows:
        blocks.append(finalists)
    blocks.append(trials_table(view))
    if view.rejected_by_kind():
        blocks.append(rejected_table(view))
    if importance and importance.shares:
        blocks.append(_importance_table(importance.shares))
    elif importance:
        blocks.append(Line(f"\nImportance: {importance.why}.", Tone.DIM))
    blocks.append(_time_table(view))
    return blocks


def verdict_block(view: StudyView) -> Line:
    return Line(view.verdict_line(), _VERDICT_TONES[view.verdict] if view.verdict else Tone.DIM, strong=True)


def comparison_table(rows: Sequence[Comparison], challenger: str = "winner") -> Table:
    """Baseline against winner (or a finalist that is no better) on every metric; the range over engine starts in brackets.
    The baseline alone where nothing was compared with it."""
    other = (Column(challenger.capitalize(), right=True), Column("Change", right=True), Column(""))
    alone = all(row.winner is None for row in rows)
    columns = (Column("Metric"), Column("Baseline", right=True), *(() if alone else other))
    starts = max((spread.starts for row in rows for spread in (row.baseline, row.winner) if spread), default=1)
    note = f"Mean of {starts} starts (least to greatest)." if starts > 1 else "One engine start each: no interval."
    table = TableMaker("Baseline" if alone else f"Baseline against {challenger}", columns, note)
    for row in rows:
        tone, word = _direction(row)
        change = wording.change_text(row.change) if row.change is not None else wording.NONE
        unit = wording.metric_unit(row.metric)
        name = wording.metric_label(row.metric) + (f", {unit}" if unit else "")
        compared = () if alone else (spread_text(row.metric, row.winner), change, word)
        table.add(name, spread_text(row.metric, row.baseline), *compared, tone=tone)
    return table.done()


def _direction(row: Comparison) -> tuple[Tone, str]:
    """Whether a change is for the better. Where the ranges of the starts overlap, that is for nobody to say."""
    if row.few:
        return Tone.PLAIN, "few requests"
    if row.better is None:
        return Tone.PLAIN, "as sent" if row.as_sent else ""
    if row.overlaps:
        return Tone.PLAIN, "ranges overlap"
    if row.too_little:
        return Tone.PLAIN, ""
    return (Tone.GOOD, "better") if row.better else (Tone.BAD, "worse")


def spread_text(metric: str, spread: Spread | None) -> str:
    """``24,000 (23,870–24,110)``, without the unit."""
    if spread is None:
        return wording.NONE
    mean, low, high = (wording.metric_text(metric, value, unit=False) for value in (spread.mean, spread.low, spread.high))
    return mean if spread.starts < 2 or low == high else f"{mean} ({low}–{high})"


def front_table(view: StudyView, answer: Recommendation) -> Table:
    """Of several goals: the configurations that no other one beats in all of them, the knee marked."""
    metrics = [str(one["metric"]) for one in view.goal["objectives"]]
    columns = (
        Column("Trial", right=True),
        *(Column(wording.metric_label(name) + _unit(name), right=True) for name in metrics),
        Column(""),
        Column("Configuration", wide=True),
    )
    table = TableMaker(
        "Front",
        columns,
        "No configuration of the search clearly beats one of these in every goal; the knee is what was confirmed.",
    )
    for member in answer.front:
        figures = (wording.metric_text(name, member.values.get(name), unit=False) for name in metrics)
        words = ", ".join(word for word, true in (("knee", member.knee), ("baseline", member.baseline)) if true)
        config = wording.one_line(wording.config_text(member.config))
        table.add(member.label, *figures, words, config, tone=Tone.GOOD if member.knee else Tone.PLAIN)
    return table.done()


def _unit(name: str) -> str:
    unit = wording.metric_unit(name)
    return f", {unit}" if unit else ""


def trials_table(view: StudyView) -> Table:
    """The engine starts of the search, one row each: what, how good, what came of it."""
    columns = (
        Column("Trial", right=True),
        Column(wording.metric_label(view.metric) + _unit(view.metric), right=True),
        Column("vs baseline", right=True),
        Column("Success", right=True),
        Column("p95 TTFT", right=True),
        Column("Result"),
        Column("Configuration", wide=True),
    )
    table = TableMaker("Search", columns)
    baseline = view.value(view.baseline_start) if view.baseline_start is not None else None
    for trial in view.searched:
        figure, excluded = view.value(trial), view.why_not(trial)
        change = wording.change_text(figure / baseline) if figure is not None and baseline else wording.NONE
        metrics = trial.metrics
        table.add(
            trial.label,
            wording.metric_text(view.metric, figure, unit=False),
            change,
            wording.metric_text("success_rate", metrics.get("success_rate") if metrics else None),
            wording.metric_text("p95_ttft_s", metrics.get("p95_ttft_s") if metrics else None),
            wording.kind_text(excluded[0]) if excluded else "ok",
            wording.one_line(wording.config_text(trial.config)),
            tone=Tone.BAD if excluded else Tone.PLAIN,
        )
    return table.done()


def rejected_table(view: StudyView) -> Table:
    """What cannot be the answer, grouped by kind."""
    columns = (Column("Kind"), Column("Trial", right=True), Column("Reason", wide=True), Column("Configuration", wide=True))
    groups = view.rejected_by_kind()
    table = TableMaker(f"Rejected ({sum(map(len, groups.values()))})", columns)
    for kind, rows in groups.items():
        for place, row in enumerate(rows):
            said = wording.kind_text(kind) if place == 0 else ""
            config = wording.one_line(wording.config_text(row.config))
            table.add(said, row.label, wording.one_line(row.reason, _REASON_WIDTH), config, tone=Tone.BAD)
    return table.done()


def _setup_facts(view: StudyView) -> list[tuple[str, str]]:
    fixed = view.setup.get("fixed") or {}
    options = (
        ("Study", f"{view.name}, begun {view.record.created_at}"),
        ("Model", view.model),
        ("Machine", view.machine + (" (simulated)" if view.simulated and "simulated" not in view.machine else "")),
        ("Goal", f"{view.goal.get('name', '')} ({'highest' if view.maximize else 'lowest'} {view.metric})"),
        ("Limits", "; ".join(view.limits)),
        ("Workload", view.workload),
        ("Mode", str(view.setup.get("mode") or "")),
        ("In every start", wording.one_line(wording.config_text(fixed)) if fixed else ""),
    )
    return [(name, value) for name, value in options if value]


def _gain_facts(view: StudyView, answer: Recommendation) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if answer.gain and answer.verdict is not Verdict.NOTHING_FEASIBLE:
        rows.append(("Gain" if view.maximize else "Change", view.gain_text(answer.gain)))
        if answer.gain.smallest_visible is not None:
            visible = wording.visible_text(answer.gain.smallest_visible, maximize=view.maximize)
            what = "gain" if view.maximize else "fall"
            rows.append(("Could have seen", f"a {what} of {visible} or more, four times in five"))
    for one in answer.goals:
        gain = wording.gain_text(one.gain, maximize=not wording.lower_is_better(one.metric))
        rows.append((one.name.capitalize(), f"{one.verdict}: {wording.metric_word(one.metric)} {gain}"))
    if load := load_said(view):
        rows.append(("Load", load))
    if costs := view.costs():
        rows += [("Costs" if place == 0 else "", cost_text(row)) for place, row in enumerate(costs)]
    elif answer.winner_config is not None:
        rows.append(("Costs", "nothing measurable on the other metrics"))
    if answer.success:
        failed = f"{answer.success.failed:,} of {answer.success.n:,}"
        rows.append(("Failed requests", f"{failed}; at most {answer.success.upper_failure_share * 100:.2g} % (95 % bound)"))
    if answer.soak:
        rows.append(("Soak", answer.soak))
    if below := view.below_defaults():
        rows.append(("Less than default", "; ".join(below)))
    if view.simulated:
        rows.append(("Simulated", "no engine ran; measure the command on the real GPU before you rely on it"))
    return rows + _notes(view)


def _notes(view: StudyView) -> list[tuple[str, str]]:
    return [("Note", note) for note in view.notes]


def cost_text(row: Comparison) -> str:
    """``p95 TTFT +16.3 % (430 ms -> 500 ms)``."""
    assert row.change is not None
    before, after = (wording.metric_text(row.metric, spread.mean if spread else None) for spread in (row.baseline, row.winner))
    return f"{wording.metric_label(row.metric)} {wording.change_text(row.change)} ({before} → {after})"


def override_table(view: StudyView, answer: Recommendation) -> Table:
    """Each override of the finalist: kept or dropped, and what it is worth."""
    columns = (
        *(Column("Override"), Column("Value", wide=True), Column("")),
        *(Column("Worth", right=True), Column("Why", wide=True)),
    )
    table = TableMaker("What each override is worth", columns)
    for row in answer.overrides:
        kept = "kept" if row.kept else "dropped"
        worth = view.gain_text(row.worth) if row.worth else "not measured"
        value = wording.one_line(wording.value_text(row.value))
        table.add(row.name, value, kept, worth, row.reason, tone=Tone.PLAIN if row.kept else Tone.DIM)
    return table.done()


def finalist_table(view: StudyView) -> Table:
    """The starts after the search: screening, confirmation, soak."""
    columns = (
        Column("Start"),
        Column("Stage"),
        Column("Arm"),
        Column(wording.metric_label(view.metric) + _unit(view.metric), right=True),
        Column("Success", right=True),
        Column("Loaded over"),
        Column("Configuration", wide=True),
    )
    table = TableMaker("Finalists: screening, confirmation, soak", columns)
    for trial in view.trials:
        if trial.stage not in (Stage.SCREENING, Stage.CONFIRMATION, Stage.SOAK):
            continue
        success = trial.metrics.get("success_rate") if trial.metrics else None
        table.add(
            trial.label,
            str(trial.stage),
            str(trial.arm) if trial.arm else "",
            wording.metric_text(view.metric, view.comparable(trial), unit=False),
            wording.metric_text("success_rate", success),
            wording.loaded_over(trial.served, view.simulated).partition(",")[0],
            wording.one_line(wording.config_text(trial.config)),
            tone=Tone.BAD if view.why_not(trial) else Tone.PLAIN,
        )
    return table.done()


def _importance_table(importance: Mapping[str, float]) -> Table:
    joined = any(wording.TOGETHER in name for name in importance)
    note = "Of the differences between feasible starts, estimated: --explain measures what a flag is worth."
    if joined:
        note += " Names joined by + were changed in the same trials: their shares cannot be told apart."
    columns = (Column("Parameter"), Column("Share", right=True), Column(""))
    table = TableMaker("Importance", columns, note)
    for name, share in sorted(importance.items(), key=lambda row: -row[1]):
        table.add(name, f"{share * 100:.0f} %", "█" * max(1, round(share * 30)) if share >= 0.005 else "")
    return table.done()


def _time_table(view: StudyView) -> Table:
    phases = tuple(view.phase_totals())
    columns = (Column("Stage"), *(Column(name, right=True) for name in ("Starts", "Time", *map(str, phases))))
    table = TableMaker("Where the time went", columns, "Hours:minutes:seconds. load: probes, warm-up and measuring.")
    for stage, (starts, seconds) in view.stage_totals().items():
        table.add(str(stage), str(starts), wording.clock(seconds), *_phase_cells(view.stage_phases(stage), phases))
    starts, seconds = len(view.trials), sum(view.phase_totals().values())
    table.add("all", str(starts), wording.clock(seconds), *_phase_cells(view.phase_totals(), phases), tone=Tone.DIM)
    return table.done()


def _phase_cells(spent: Mapping[Phase, float], phases: Sequence[Phase]) -> list[str]:
    return [wording.clock(spent[phase]) if phase in spent else wording.NONE for phase in phases]
