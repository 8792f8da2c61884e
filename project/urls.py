"""URLs of the example project."""

from django.contrib import admin
from django.contrib.auth.views import LoginView, LogoutView
from django.templatetags.static import static
from django.urls import include, path
from django.views.generic import RedirectView

from project.views import chat, index

admin.site.site_header = admin.site.site_title = "psqlmessages"

urlpatterns = [
    path("", index, name="index"),
    path("chat/", chat, name="chat"),
    path("login/", LoginView.as_view(template_name="login.html"), name="login"),
    path("logout/", LogoutView.as_view(next_page="index"), name="logout"),
    path("favicon.ico", RedirectView.as_view(url=static("example/icon.svg"))),
    path("admin/", admin.site.urls),
    path("", include("psqlmessages.urls")),
]
