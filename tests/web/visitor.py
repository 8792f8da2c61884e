"""Pages as a browser without scripts sees them: text, links, and forms to be filled in and sent."""

from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

from django.http import HttpResponse
from django.test import Client


class Form:
    """A form, with what it holds. `values` may be changed before it is sent."""

    def __init__(self, attributes: dict[str, str]) -> None:
        self.action = attributes.get("action", "")
        self.values: dict[str, list[Any]] = {}
        self.buttons: dict[str, str] = {}
        self.choices: dict[str, list[str]] = {}

    def hold(self, name: str, value: str) -> None:
        self.values.setdefault(name, []).append(value)


class Page(HTMLParser):
    def __init__(self, url: str, response: HttpResponse) -> None:
        super().__init__()
        self.url = url
        self.status = response.status_code
        self.html = response.content.decode()
        self.forms: list[Form] = []
        self.links: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.messages: list[str] = []
        self.errors: list[str] = []
        self._texts: list[str] = []
        self._form: Form | None = None
        self._select = self._link = self._into = self._list = ""
        self.feed(self.html)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    @property
    def buttons(self) -> set[str]:
        return {button for form in self.forms for button in form.buttons}

    def form(self, button: str) -> Form:
        (found,) = [form for form in self.forms if button in form.buttons]
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append((tag, given))
        if tag == "form":
            self._form = Form(given)
            self.forms.append(self._form)
        elif tag == "a":
            self._link = given.get("href", "")
        elif tag == "ul":
            self._list = given.get("class", "").split(" ")[0]
        elif tag == "li" and self._list in ("messagelist", "errorlist"):
            self._into = self._list
            (self.messages if self._into == "messagelist" else self.errors).append("")
        if self._form is not None and "disabled" not in given:
            self._handle_field(tag, given)

    def _handle_field(self, tag: str, given: dict[str, str]) -> None:
        form, name, kind = self._form, given.get("name", ""), given.get("type", "text")
        assert form is not None
        if tag in ("input", "button") and kind == "submit":
            form.buttons[given.get("value", name)] = name
        elif tag == "button":
            form.buttons[given.get("title", name)] = name
            form.choices[name] = [given.get("value", "")]
        elif tag == "input" and name and kind != "file":
            is_box = kind in ("checkbox", "radio")
            if not is_box or "checked" in given:
                form.hold(name, given.get("value", "on" if is_box else ""))
        elif tag == "textarea":
            form.hold(name, "")
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select:
            form.choices.setdefault(self._select, []).append(given.get("value", ""))
            if "selected" in given:
                form.hold(self._select, given.get("value", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None
        elif name := {"select": "_select", "ul": "_list", "li": "_into"}.get(tag):
            setattr(self, name, "")

    def handle_data(self, data: str) -> None:
        self._texts.append(data)
        if self._link and data.strip():
            self.links.setdefault(data.strip(), self._link)
            self._link = ""
        if self._into:
            (self.messages if self._into == "messagelist" else self.errors)[-1] += data.strip()


class Visitor:
    """Somebody with a browser. Forms are sent with what their page gave them, token included."""

    def __init__(self) -> None:
        self.client = Client(enforce_csrf_checks=True)

    def open(self, path: str) -> Page:
        return self._page(path, self.client.get(path))

    def follow(self, page: Page, link: str) -> Page:
        return self.open(urljoin(page.url, page.links[link]))

    def send(self, page: Page, button: str, **values: Any) -> Page:
        """Fill in the form that has this button, and press it; None takes a field out."""
        form = page.form(button)
        held = {**form.values, **values}
        if name := form.buttons[button]:
            held[name] = form.choices.get(name, [button])[0]
        path = urljoin(page.url, form.action)
        given = {name: value for name, value in held.items() if value is not None}
        return self._page(path, self.client.post(path, given))

    def _page(self, path: str, response: HttpResponse) -> Page:
        while response.status_code == 302:
            path = urljoin(path, response["Location"])
            response = self.client.get(path)
        return Page(path, response)
