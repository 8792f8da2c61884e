"""`make digest`: write the digest of the SQL into the latest migration that installs it."""

import re

from psqlmessages.sql import MIGRATIONS, digest

DIGEST = re.compile(r'(InstallSQL\("[^"]*", digest=")[0-9a-f]+')


def main() -> None:
    """Replace the digest; if this changes the migration, print the migration's path."""
    installing = [path for path in MIGRATIONS.glob("0*.py") if DIGEST.search(path.read_text())]
    latest = max(installing)
    text = latest.read_text()
    changed = DIGEST.sub(rf"\g<1>{digest()}", text)
    if changed != text:
        latest.write_text(changed)
        print(latest)


if __name__ == "__main__":
    main()
