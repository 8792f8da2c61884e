"""Let an exchange discard elements that no destination accepts."""

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar = [("psqlmessages", "0013_operator_permissions")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="exchange",
            name="no_route_action",
            field=models.CharField(
                choices=[
                    ("queue", "goes to the queue __no_route__"),
                    ("discard", "is removed, and counted as discarded"),
                ],
                db_collation="C",
                db_default="queue",
                default="queue",
                help_text=(
                    "What happens to an element that no destination accepts. If a selector failed,"
                    " the element is never discarded."
                ),
                max_length=7,
                verbose_name="without route",
            ),
        ),
        migrations.AlterField(
            model_name="exchangecount",
            name="outcome",
            field=models.CharField(
                choices=[
                    ("ok", "routed"),
                    ("no_route", "no route"),
                    ("discarded", "discarded"),
                    ("too_many_hops", "too many hops"),
                    ("failed", "failed"),
                    ("to", "copies"),
                    ("bad_selector", "failed selectors"),
                ],
                db_collation="C",
                max_length=13,
            ),
        ),
        migrations.AddConstraint(
            model_name="exchange",
            constraint=models.CheckConstraint(
                condition=models.Q(no_route_action__in=("queue", "discard")),
                name="exchange_no_route_action_is_known",
            ),
        ),
    ]
