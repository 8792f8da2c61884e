"""Temporary."""
import os, signal, subprocess, sys, threading
from time import monotonic
import pytest
from psqlmessages.graph import stored
from tests.django.processes import ROOT, environment
from tests.exchanges.field import Field
from tests.pipeline.exchanging import Runner

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(3000)]
N = int(os.environ.get("ROWS", "20000"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
COUNT = "SELECT count(*) FROM psqlmessages_element AS e JOIN psqlmessages_queue AS q ON q.id = e.queue_id WHERE q.name = 'b'"

def cpu(pids):
    total = 0
    for pid in pids:
        try:
            parts = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += sum(map(int, parts[11:15]))
    return total / 100

def tree(root):
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found

def test_bench(field: Field, spark):
    define = lambda: field.define(x1={"consumer": {"parallel": 1, "wsize": 200}, "src": "a", "dst": [{"queue": "b", "selector": 'msg.headers["country"].matches("^(it|de|fr)$")'}, "c"]})
    define()
    runner = Runner(spark, span=5.0, linger=1.0)
    stored.set_running("x1", is_running=False)
    env = {**environment(field.default.server), "PYTHONWARNINGS": ""}
    local = [subprocess.Popen([sys.executable, "-m", "django", "psqlmessages", "exchange", "run"], env=env, cwd=ROOT) for _ in range(2)]
    pause = threading.Event()
    try:
        pause.wait(10)
        os.kill(local[1].pid, signal.SIGSTOP)
        body = "x" * 1000
        figures = {}
        def fill():
            field.default.clear()
            for start in range(0, N, 500):
                field.default.push_many("a", [body] * 500, country="it")
            field.default.query("SELECT 1")
            field.default.connection.execute("VACUUM ANALYZE psqlmessages_element")
        def run(mode):
            fill()
            pids = tree(os.getpid()) if mode == "spark" else [p.pid for p in local]
            before = cpu(pids)
            if mode == "spark":
                graphs = [stored.compiled(row) for row in stored.rows()]
                runner.exchanges.define(graphs)
            else:
                if mode == "local2":
                    os.kill(local[1].pid, signal.SIGCONT)
                    pause.wait(0.6)
                stored.set_running("x1", is_running=True)
            first = None
            while True:
                assert runner.query.isActive
                count = field.default.query(COUNT)
                now = monotonic()
                if first is None and count:
                    first, base = now, count
                if count >= N:
                    break
                pause.wait(0.05)
            rate = (N - base) / (now - first)
            spent = cpu(tree(os.getpid()) if mode == "spark" else pids) - before
            figures.setdefault(mode, []).append(rate)
            print(f"{mode}: {rate:,.0f}/s over {now-first:.2f} s, cpu {spent:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            if mode == "spark":
                runner.rest()
            else:
                stored.set_running("x1", is_running=False)
                pause.wait(1.0)
                if mode == "local2":
                    os.kill(local[1].pid, signal.SIGSTOP)
        run("spark")
        figures.clear()
        for _ in range(ROUNDS):
            for mode in ("local1", "spark", "local2"):
                run(mode)
        for mode, rates in figures.items():
            print(mode, "median", f"{sorted(rates)[len(rates)//2]:,.0f}")
        for mode in ("spark", "local1"):
            field.default.clear()
            if mode == "spark":
                runner.define()
            else:
                stored.set_running("x1", is_running=True)
            pause.wait(2)
            waits = []
            for number in range(6):
                pause.wait(2.5)
                began = monotonic()
                field.default.push("a", "it", country="it")
                while field.default.query(COUNT) <= number:
                    pause.wait(0.002)
                waits.append(monotonic() - began)
            print(mode, "idle to routed ms", [round(w * 1000) for w in sorted(waits)], flush=True)
            if mode == "spark":
                runner.rest()
    finally:
        os.kill(local[1].pid, signal.SIGCONT)
        for p in local:
            p.terminate()
        for p in local:
            p.wait(30)
        runner.stop()
