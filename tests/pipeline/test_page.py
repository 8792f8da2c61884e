"""The examples on the first screen of docs/reference/pipeline.md run, and do what they say."""

import re
from pathlib import Path

from pyspark.sql import SparkSession

from psqlmessages.pipeline import sink
from psqlmessages.pipeline.source_options import SOURCE_OPTIONS
from tests.sql.conftest import World

PAGE_FILE = Path(__file__).parents[2] / "docs/reference/pipeline.md"
PAGE = PAGE_FILE.read_text()


def test_the_other_examples_run(spark: SparkSession, world: World, tmp_path: Path):
    owner = world.owner.query("SELECT session_user")
    world.rules(f"{owner} pipeline Queue WORK W 10")
    archive = tmp_path / "archive/data"
    df = spark.sql("SELECT 'ORDERS' AS topic, date '2030-12-31' AS date, 'x' AS body")
    df.write.partitionBy("topic", "date").parquet(str(archive))
    live = spark.readStream.format("psqlmessages").option("topic", "ORDERS").load()
    names = {"spark": spark, "df": df.select("body"), "live": live, "graphs": []}
    for page, number in (("pipeline", 1), ("archive", 0), ("jobs", 0)):
        text = PAGE_FILE.with_name(f"{page}.md").read_text()
        for rules in re.findall(r"```sql\n(.*?)```", text, re.DOTALL):
            world.execute(rules)
        world.execute("UPDATE messages.auth SET mode = 'RW' WHERE dest = 'ORDERS'")
        world.execute("UPDATE psqlmessages_topic SET retention = 3600")
        code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
        code = code.replace(".awaitTermination()", "").replace('"/data/', f'"{tmp_path}/')
        exec(code.replace('"checkpoints/', f'"{tmp_path}/'), names)  # noqa: S102 - our own page
        for query in spark.streams.active:
            query.stop()
    stored = world.execute("SELECT body FROM messages.stored WHERE topic = 'ORDERS'")
    assert stored.fetchall() == [("x",)]


def named_in(section: str) -> str:
    return PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]


def test_the_first_example_runs(spark: SparkSession, world: World, tmp_path: Path, capsys):
    rules, code = re.findall(r"```(?:sql|python)\n(.*?)```", PAGE, re.DOTALL)[:2]
    world.execute(rules)
    world.execute("UPDATE psqlmessages_topic SET retention = 3600")
    world.rules("user1 SHOP Topic ORDERS W 10", "user1 OTHER Topic ORDERS W 10")
    shop = world.program("user1")
    for ident, body in (("SHOP", "a"), ("SHOP", "order 2"), ("OTHER", "b"), ("SHOP", "order 3")):
        shop.ok("publish", ident, "ORDERS", body)
    code = code.replace('"checkpoints/', f'"{tmp_path}/')
    exec(compile(code, "docs/reference/pipeline.md", "exec"), {})  # noqa: S102 - our own page
    printed = re.findall(r"^print.*# (.*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.split("\n")[:-1] == printed
    large = world.execute("SELECT body FROM messages.stored WHERE topic = 'LARGE' ORDER BY body")
    assert large.fetchall() == [("order 2",), ("order 3",)]


def test_each_option_is_documented():
    table = re.findall(r"^\| `(\w+)` \|", named_in("Read"), re.MULTILINE)
    assert sorted(table) == sorted(SOURCE_OPTIONS)
    assert all(f"`{name}`" in named_in("Write") for name in sink.OPTIONS)
