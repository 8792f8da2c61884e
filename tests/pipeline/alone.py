"""A driver for itself, where Django cannot be imported: prints what it finds as a line of JSON.

python -m tests.pipeline.alone TOPIC
"""

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from psqlmessages.pipeline import register, session
from psqlmessages.pipeline.private_folder import driver_folder
from psqlmessages.pipeline.spark_session import SparkContext, stop
from tests.pipeline.processes import QUICK_JAVA, addresses_listened_on

CONFIGURATION = {
    "spark.driver.memory": "512m", "spark.sql.session.timeZone": "Europe/Rome",
    "spark.driver.extraJavaOptions": f'-Dof.the.caller="two words" {QUICK_JAVA}',
    "spark.ui.enabled": True,
}  # fmt: skip


def is_importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def work(topic: str) -> dict[str, Any]:
    spark = register(session("alone", "local[1]", **CONFIGURATION))
    to_topic = {"topic": topic, "client": "pipeline"}
    spark.range(3).selectExpr("CAST(id AS string) AS body").write.format("psqlmessages").options(
        **to_topic
    ).mode("append").save()
    read = spark.read.format("psqlmessages").options(**to_topic).load()
    workers = spark.sparkContext.parallelize([0], 1).map(
        lambda _: {
            "django": is_importable("django"), "client": is_importable("psqlmessages.client"),
            "python": sys.executable, "pyspark": importlib.import_module("pyspark").__file__,
        }
    )  # fmt: skip
    system = spark._jvm.java.lang.System
    process, folder = int(SparkContext._gateway.proc.pid), driver_folder()
    found: dict[str, Any] = {
        "SPARK_HOME": os.environ.get("SPARK_HOME"), "on an executor": workers.collect()[0],
        "bodies": sorted(row.body for row in read.collect()),
        "django on the driver": is_importable("django"),
        "java": system.getProperty("java.home"),
        "of the caller": system.getProperty("of.the.caller"),
        "time zone": spark.conf.get("spark.sql.session.timeZone"),
        "addresses": sorted(addresses_listened_on({os.getpid(), process})),
        "temporary": sorted({path.name.partition("-")[0] for path in folder.iterdir()}),
    }  # fmt: skip
    stop()
    goes_on = {"java goes on": Path(f"/proc/{process}").exists()}
    return found | goes_on | {"folder is there": folder.exists()}


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1])))
