"""The user model of the project."""

from django.contrib.auth.models import AbstractUser
from django.db import models


class Person(AbstractUser):
    """A user whose key is no number, and who has no groups."""

    groups = None
    code = models.CharField(max_length=20, primary_key=True)
