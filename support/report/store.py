"""A report's results as they come: `results.jsonl`, a line a job, and the processes that the jobs run in."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cli import InputError, say
from support.runlog import git_commit

FILE = "results.jsonl"
DONE, FAILED, SKIPPED, TIMED_OUT = "done", "failed", "skipped", "timed out"


@dataclass(frozen=True)
class Job:
    """A piece of a report that is measured in one process: it is done or not."""

    part: str
    name: str
    limit: float = 180.0  # seconds until it is killed
    skip: str = ""  # why this machine leaves it out
    goes_on: bool = False  # whether it keeps what it has done: killed at its bound, it is started again


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a report's results; what a kill left of a last line is cut off. Raises InputError."""
    path = folder / FILE
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    rows = []
    for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or (number > 1 and not {"part", "job", "status"} <= row.keys()):
                raise ValueError("no result")
        except ValueError:
            raise InputError(f"{path}, line {number}: no result; remove the line, and its job runs again") from None
        rows.append(row)
    return rows


def append_result(folder: Path, row: dict[str, Any]) -> None:
    """Adds a line, in one write, and puts it on the disk."""
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(row) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_results(folder: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """The results in a folder, which is made if need be; a new file begins with `header`.

    Raises InputError when the results are of another device or of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_results(folder)
    if not rows:
        append_result(folder, header)
        return [header]
    for name, value in header.items():
        if rows[0].get(name) != value:
            raise InputError(f"{folder / FILE}: its {name} is {rows[0].get(name)!r}, here it is {value!r}: give this "
                             "report a folder of its own")
    return rows


def newest(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """(part, job) -> its last line."""
    return {(row["part"], row["job"]): row for row in rows if "part" in row}


def result_row(part: str, job: str, status: str, began: float, reason: str = "", result: Any = None) -> dict[str, Any]:
    return {"part": part, "job": job, "status": status, "reason": reason, "result": result,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "seconds": round(time.time() - began, 1), "commit": git_commit()}


def run_job(command: list[str], part: str, job: str, limit: float) -> dict[str, Any] | None:
    """Runs `command`, which writes its result to the file that --json names, in a process group of its own; the row for
    its line. None when the job says that it is unfinished and wants to be called again.

    After `limit` seconds it is killed with all that it started; so it is when this process ends, however that may be
    (see die_with_parent).
    """
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "result.json"), Path(folder, "stderr.txt")
        with open(log, "wb") as stderr:
            child = subprocess.Popen([*command, "--json", str(path)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                     stderr=stderr, start_new_session=True)
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_group(child)
        if status is None:
            return result_row(part, job, TIMED_OUT, began, f"stopped after {limit:.0f} s, its bound")
        if status == 0 and path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            if result.get("unfinished"):
                return None
            return result_row(part, job, FAILED if result.get("problem") else DONE, began, result.get("problem", ""),
                              result)
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "")
        return result_row(part, job, FAILED, began, last.removeprefix("error: ")[:300] or f"ended with status {status}")


def work_through(
    folder: Path, rows: list[dict[str, Any]], jobs: list[Job], command_for: Callable[[Job], list[str]],
    write: Callable[..., None], retry: bool, minutes: float,
) -> None:
    """Runs, one after another, the jobs that have no line among `rows` (with `retry`: or one that failed), and adds
    their lines there and in the folder. `write` makes the page after each job, the pictures after each part. No job is
    started after `minutes` (0: whenever)."""
    began, tried, unfinished = time.monotonic(), set(), 0
    while True:
        known = newest(rows)
        done = {key for key, row in known.items() if not retry or row["status"] in (DONE, SKIPPED)}
        left = [job for job in jobs if (job.part, job.name) not in done and job not in tried]
        if not left:
            break
        job, spent = left[0], time.monotonic() - began
        if minutes and spent > 60 * minutes:
            say(f"{minutes:g} minutes are over; the same command goes on with {job.part}/{job.name}, {len(left)} jobs "
                "are left")
            break
        if job.skip:
            row = result_row(job.part, job.name, SKIPPED, time.time(), job.skip)
        else:
            say(f"{spent:5.0f} s  {job.part}/{job.name}")
            row = run_job(command_for(job), job.part, job.name, job.limit)
            cut = row is None or (job.goes_on and row["status"] == TIMED_OUT)
            if cut and (unfinished := unfinished + 1) < 20:
                say(f"         goes on: {job.part}/{job.name}")
                continue
            row = row or result_row(job.part, job.name, TIMED_OUT, time.time(), "unfinished after 20 goes")
        tried.add(job)
        if job.name.startswith("B=") and "out of memory" in row["reason"]:
            row["status"] = SKIPPED  # no failure: not every B fits
        if row["status"] in (FAILED, TIMED_OUT):
            say(f"         {row['status']}: {row['reason']}")
        append_result(folder, row)
        rows.append(row)
        if row["status"] != SKIPPED:
            write(folder, rows, draw=len(left) > 1 and left[1].part != job.part)
    write(folder, rows)


def kill_group(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
    if child.stdin:
        child.stdin.close()


def die_with_parent() -> None:
    """In a job: ends it and what it started as soon as the process that started it is gone, whose end of the pipe at
    standard input closes then. Otherwise two of them might measure side by side. A job started by hand is left alone.
    """
    if not hasattr(os, "getpgrp") or os.getpgrp() != os.getpid():  # run_job makes it the first of a group
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 1):
                pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
