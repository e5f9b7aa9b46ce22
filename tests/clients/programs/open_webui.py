"""Open WebUI, used in Chromium: a picture is attached, and the page shows the answer."""

import shutil
import tempfile

from features import ABOUT_PICTURE, KEY, PICTURE_FILE, PLAIN, QUESTION, URL, report, serving
from playwright.sync_api import sync_playwright

_SETTINGS = {
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": KEY,
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "of-the-test",
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "openai",  # its own would be fetched from the hub
    "OFFLINE_MODE": "True",
    "DEFAULT_MODEL_METADATA": '{"capabilities": {"builtin_tools": false, "vision": true}}',  # the model would call one
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
}


def question_and_picture_in_chromium():
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("open-webui", "serve", path="/health", DATA_DIR=folder, **_SETTINGS) as url,
        sync_playwright() as playwright,
    ):
        shell = shutil.which("chromium-headless-shell")
        browser = playwright.chromium.launch(executable_path=shell, chromium_sandbox=False)
        page = browser.new_page()
        for files, answer in (([], PLAIN), ([PICTURE_FILE], ABOUT_PICTURE)):
            page.goto(url)
            box = page.locator("#chat-input")
            box.wait_for(timeout=60_000)
            if (greeting := page.get_by_role("button", name="Okay, Let's Go!")).is_visible():
                greeting.click()
            if files:
                page.locator("input[type=file]").first.set_input_files(files)
                page.locator("form img").first.wait_for(timeout=20_000)
            box.fill(QUESTION)
            page.keyboard.press("Enter")
            page.locator(".chat-assistant").get_by_text(answer).wait_for(timeout=60_000)
        browser.close()


report(question_and_picture_in_chromium)
