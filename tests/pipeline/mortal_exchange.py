"""A driver that is killed: it runs the exchanges whose definitions it is given, until then."""

import sys

from psqlmessages.pipeline import session
from psqlmessages.pipeline.exchange import SparkExchanges
from psqlmessages.pipeline.exchange_definition import compiled


def main() -> None:
    spark = session("mortal", "local[2]", **{"spark.driver.memory": "512m"})
    exchanges = SparkExchanges(spark, lambda turn, _: print(turn, flush=True), tasks=2, span=1.0)
    exchanges.define(compiled(sys.stdin.readline(), ()))
    exchanges.start().awaitTermination()


if __name__ == "__main__":
    main()
