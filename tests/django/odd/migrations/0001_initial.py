from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = [("auth", "0012_alter_user_first_name_max_length")]
    operations = [
        migrations.CreateModel("Person", [
            ("code", models.CharField(max_length=20, primary_key=True)),
            ("password", models.CharField(max_length=128)),
            ("last_login", models.DateTimeField(null=True)),
            ("is_superuser", models.BooleanField()),
            ("username", models.CharField(max_length=150, unique=True)),
            ("first_name", models.CharField(max_length=150)),
            ("last_name", models.CharField(max_length=150)),
            ("email", models.EmailField()),
            ("is_staff", models.BooleanField()),
            ("is_active", models.BooleanField()),
            ("date_joined", models.DateTimeField()),
            ("user_permissions", models.ManyToManyField("auth.permission")),
        ])
    ]  # fmt: skip
