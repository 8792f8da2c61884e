# The example project as an image. For your own project, replace the lines that copy and install it.
FROM python:3.13-slim AS build
WORKDIR /build
COPY requirements-run.txt ./
RUN python -m venv /venv \
    && grep -v pgserver requirements-run.txt > requirements.txt \
    && /venv/bin/pip install --no-cache-dir -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY psqlmessages psqlmessages
RUN /venv/bin/pip install --no-cache-dir --no-deps .

FROM python:3.13-slim
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 DJANGO_SETTINGS_MODULE=project.settings DEBUG=0
RUN useradd --system --create-home --uid 10001 app
WORKDIR /app
COPY --from=build /venv /venv
COPY --chown=app manage.py ./
COPY --chown=app project project
COPY --chown=app templates templates
COPY --chown=app static static
# A volume at .static belongs to the user, as this folder does.
RUN chown app /app && install -d -o app .static
USER 10001
EXPOSE 8000
# Exits with 1 unless /healthz answers 200.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz')"]
CMD ["daphne", "--bind", "0.0.0.0", "--port", "8000", "project.asgi:application"]
