"""Every optimizer class of torch and fourteen libraries on sharded models, against one process.

    pip install -e '.[campaigns]'            # the libraries; what is not installed is left out
    make soak CAMPAIGN=optimizers            # all classes on 2 ranks; writes docs/optimizers.json
    python tests/campaigns/optimizers.py torch.AdamW heavyball --ranks 3 --show

Each class takes six steps in one process and on ranks, in each case of `optimizer_cases.CASES`. Its
verdict is one of:

bits        the parameters of one process
rounding    those parameters but for roundings, see `optimizer_cases` for the bound
codes       as far from them as codes of 8 bits are from numbers; see there
refused     a ShardwiseError on all ranks; the remedies that it names are followed, and must work
ERROR       another exception; or not the same on all ranks
WRONG       other parameters than those of one process
HANG        no answer in `--timeout` seconds; the ranks are started anew

A case that is refused runs again with `shardwise.optim.gathering` (``gathering`` in the results).
The exit status is 1 if a class is WRONG, an ERROR or a HANG, or if a remedy does not work.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples"), str(HERE), str(HERE.parent)]

import optimizer_cases  # noqa: E402
import ranks  # noqa: E402
import shardwise  # noqa: E402
from optimizer_cases import RIGHT  # noqa: E402
from optimizer_classes import LEFT_OUT, PACKAGES, classes_of, version_of  # noqa: E402

OURS = ("stage 1 rows", "stage 3 rows", "stage 3 flat", "stage 3 matrices", "fully_shard")
ELSEWHERE = ("DDP", "the class for one process")
ROWS = "stage 3 rows, scalar of one dim"
HAS_CODES = ("bitsandbytes", "torchao")  # which quantise large parameters only
RESULTS = ROOT / "docs" / "optimizers.json"


class Campaign:
    """Runs cases on a pool of ranks that stays open; one that hangs or fails is started anew."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s

    def call(self, function, *args):
        """Return the answers of all ranks, or what became of them."""
        try:
            return ranks.run_ranks(function, self._world_size, *args, timeout_s=self._timeout_s)
        except ranks.RankError as error:
            outcomes = [
                outcome.result or {"verdict": "HANG", "message": outcome.describe()[-1500:]}
                for outcome in error.outcomes
            ]
            if not any(outcome.timed_out for outcome in error.outcomes):
                outcomes = [{**each, "verdict": "ERROR"} for each in outcomes]
            return outcomes

    def run(self, which, cases):
        """Return the row of one class."""
        row = {"class": which.name}
        reason = LEFT_OUT.get(str(which))
        large = which.package in HAS_CODES
        if reason is None:
            facts = self.call(optimizer_cases.alone, which, large)[0]
            reason = facts.get("reason") or facts.get("message")
        if reason is not None:
            return {**row, "left out": reason}
        row |= {"parameters": facts["parameters"]}
        found = {case: self._case(which, case, facts, large) for case in cases}
        refused = [case for case, each in found.items() if each["verdict"] == "refused"]
        if refused and "stage 0" not in found:
            found["stage 0"] = self._case(which, "stage 0", facts, large)
        if hasattr(shardwise.optim, "gathering"):
            for case in refused:
                found[f"{case}, gathering"] = self._case(which, case, facts, large, True)
        if any("rows" in optimizer_cases.named_remedies(found[c]["message"]) for c in refused):
            found[ROWS] = self._case(which, ROWS, facts, large)
        for case in refused:
            found[case]["remedies"] = followed(found, case)
        return {**row, "cases": found}

    def _case(self, which, case, facts, large, gathering=False):
        args = optimizer_cases.run_case, which, case, facts, large, gathering
        answers = self.call(*args)
        verdicts = {each["verdict"] for each in answers}
        worst = next(v for v in ("HANG", "ERROR", "WRONG", *verdicts) if v in verdicts)
        answer = dict(next(each for each in answers if each["verdict"] == worst))
        if verdicts - {*RIGHT, "refused"} or (len(verdicts) > 1 and "refused" in verdicts):
            pool = ranks._pools.pop(self._world_size, None)  # which may be in the midst of a call
            if pool is not None:
                pool.close()
        if len(verdicts) > 1 and not verdicts <= set(RIGHT):
            answer["message"] = f"{'; '.join(map(str, answers))}"[:1500]
            answer["verdict"] = "ERROR" if worst == "refused" or "refused" in verdicts else worst
        return answer


def followed(found, case):
    """Follow the remedies that a refusal names: return whether each is right.

    DistributedDataParallel steps plain tensors, as the oracle does; other classes have their rows.
    """
    ways, places = {}, {"gathering": f"{case}, gathering", "stage 0": "stage 0", "rows": ROWS}
    for remedy in optimizer_cases.named_remedies(found[case]["message"]):
        other = places.get(remedy, f"stage 3 {remedy}")
        ways[remedy] = remedy in ELSEWHERE or (
            other != case and found.get(other, {}).get("verdict") in RIGHT
        )
    return ways


def faults(row):
    """Return what must not be in a row."""
    found = []
    for case, each in row.get("cases", {}).items():
        if each["verdict"] in ("WRONG", "ERROR", "HANG") and not case.startswith("torch's"):
            found.append(f"{case}: {each['verdict']}: {each.get('message', '')[:160]}")
        for remedy, works in each.get("remedies", {}).items():
            if not works:
                found.append(f"{case}: refused, and its remedy {remedy} does not work")
        is_final = "create_graph" in each.get("message", "")  # of backward, not of the optimizer
        if each["verdict"] == "refused" and not (
            each.get("remedies", case not in OURS) or is_final
        ):
            found.append(f"{case}: refused without a remedy: {each['message'][:200]}")
    return found


def chosen(words):
    """Yield the classes that are asked for: packages or ``package.Class``; all without words."""
    for package in PACKAGES:
        if version_of(package) is None:
            print(f"{package}: not installed")
            continue
        if words and not any(word.partition(".")[0] == package for word in words):
            continue
        for which in classes_of(package):
            if not words or package in words or str(which) in words:
                yield which


def short(row):
    """Return a row with verdicts and remedies only, for the docs."""
    cases = {
        case: {key: each[key] for key in ("verdict", "remedies") if key in each}
        for case, each in row.get("cases", {}).items()
        if not case.startswith("torch's")
    }
    return {**row, "cases": cases} if cases else row


def version_and_name(package):
    """Return a package's name, and its version without a local part."""
    return package, version_of(package).partition("+")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help="packages, or package.Class (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one case")
    parser.add_argument("--torch", action="store_true", help="torch's fully_shard too")
    parser.add_argument("--cases", nargs="+", choices=[*optimizer_cases.CASES], default=OURS)
    parser.add_argument("--show", action="store_true", help="print messages and tracebacks")
    parser.add_argument("--json", type=Path, help="where results go (default: docs, if all ran)")
    parser.add_argument("--trials", help="ignored; `make soak` gives it to every campaign")
    parser.add_argument("--seed", help="ignored, likewise")
    options = parser.parse_args()
    cases = (*options.cases, *(["torch's fully_shard"] if options.torch else []))
    campaign, rows, begin = Campaign(options.ranks, options.timeout), {}, time.monotonic()
    ranks.GRACE_S = min(ranks.GRACE_S, options.timeout)
    asked = {word.partition(".")[0] for word in options.classes} or set(PACKAGES)
    ranks.PRELOADED += [PACKAGES[name] for name in PACKAGES if name in asked]
    counts, wrong = Counter(), []
    is_all = not options.classes and options.cases is OURS and options.ranks == 2
    path = options.json or (RESULTS if is_all else None)
    for which in chosen(options.classes):
        row = campaign.run(which, cases)
        rows.setdefault(which.package, []).append(row)
        verdicts = {case: each["verdict"] for case, each in row.get("cases", {}).items()}
        counts.update(f"{case}: {verdict}" for case, verdict in verdicts.items())
        told = ", ".join(f"{c}: {v}" for c, v in verdicts.items()) or row.get("left out")
        print(f"{time.monotonic() - begin:5.0f} s  {which}  {told}", flush=True)
        for fault in faults(row):
            wrong.append(f"{which}  {fault}")
            print(f"         {fault}", flush=True)
        if options.show:
            print(json.dumps(row, indent=1).replace("\\n", "\n"))
        if path is not None:
            result = {"ranks": options.ranks, "versions": dict(map(version_and_name, rows))}
            told = rows if options.json else {name: list(map(short, rows[name])) for name in rows}
            path.write_text(json.dumps({**result, "classes": told}, indent=1) + "\n")
    for line in sorted(f"{n:4} {what}" for what, n in counts.items()):
        print(line)
    print(f"{sum(map(len, rows.values()))} classes, {len(wrong)} faults", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
