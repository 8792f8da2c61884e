"""Hooks of mkdocs.yml, which generate parts of the documentation from the code.

They generate the version, the list of decisions, an anchor for each error number, the OpenAPI
document of the REST API, and the AsyncAPI document of the WebSockets.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from psqlmessages.relay.protocol import MAX_REF_CHARACTERS, OPERATIONS, Field

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
JSON_TYPES = {str: "string", bool: "boolean"}


def on_config(config: MkDocsConfig) -> None:
    """Add the version to the footer, and the decisions to the navigation."""
    config.copyright = f"psqlmessages {VERSION}"
    decisions = sorted(path.name for path in (ROOT / "docs/adr").glob("*.md"))
    (explanation,) = (section["Explanation"] for section in config.nav if "Explanation" in section)
    explanation[-1]["Decisions"] = [f"adr/{name}" for name in decisions]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the OpenAPI document of the REST API and the AsyncAPI document of the WebSockets."""
    for name, document in (("openapi", openapi()), ("asyncapi", asyncapi())):
        content = json.dumps(document, indent=2, default=str)
        files.append(File.generated(config, f"reference/{name}.json", content=content))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Give each error of the table an anchor, as the target of `MessagesError.url`."""
    if page.file.src_uri != "reference/errors.md":
        return markdown
    return re.sub(r"^\| (\d+) \|", r'| <a id="error-\1"></a>\1 |', markdown, flags=re.MULTILINE)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the REST API."""
    import django
    from django.conf import settings

    if not settings.configured:
        apps = ("contrib.auth", "contrib.contenttypes", "contrib.postgres")
        installed = [*(f"django.{app}" for app in apps), "psqlmessages"]
        settings.configure(ROOT_URLCONF="psqlmessages.urls", INSTALLED_APPS=installed)
        django.setup()
    from psqlmessages.rest.api import api

    return {**api.get_openapi_schema(path_prefix="/api/"), "servers": []}


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI document of a node's WebSocket, generated from its operations."""
    ref = {"type": ["string", "number"], "maxLength": MAX_REF_CHARACTERS}
    answer = {"ref": ref, "Err": {"type": "string"}, "Errstr": {"type": "string"}}
    texts = ("Type", "Evt", "From", "To", "Ident", "Topic", "Token", "Enc", "Body", "Err", "Errstr")
    notification = {name: {"type": "string"} for name in texts} | {"Size": {"type": "integer"}}
    messages = {
        op: schema({"op": {"const": op}, "ref": ref}, fields) for op, fields in OPERATIONS.items()
    }
    messages["answer"] = {"payload": {"type": "object", "properties": answer}}
    messages["notification"] = {"payload": {"type": "object", "properties": notification}}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "psqlmessages WebSocket", "version": VERSION},
        "channels": {"node": {"address": "/ws/node/", "messages": messages}},
        "operations": {
            "request": operation("receive", OPERATIONS),
            "answer": operation("send", ["answer", "notification"]),
        },
    }


def schema(common: dict[str, Any], fields: dict[str, Field]) -> dict[str, Any]:
    """Return the schema of a message whose payload has only these fields."""
    own = {name: {"type": JSON_TYPES[field.type]} for name, field in fields.items()}
    required = [name for name, field in fields.items() if field.is_required]
    return {
        "payload": {
            "type": "object",
            "properties": common | own,
            "required": ["op", *required],
            "additionalProperties": False,
        }
    }


def operation(action: str, messages: Any) -> dict[str, Any]:
    """Return an operation of the server on the channel ``node``, with these messages."""
    references = [{"$ref": f"#/channels/node/messages/{name}"} for name in messages]
    return {"action": action, "channel": {"$ref": "#/channels/node"}, "messages": references}
