"""The user model of the project."""

from django.contrib.auth.models import AbstractUser
from django.db import models


class Person(AbstractUser):
    """A user model without groups, whose primary key is not a number."""

    groups = None
    code = models.CharField(max_length=20, primary_key=True)
