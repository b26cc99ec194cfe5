"""Colours, fonts and layout of the page, for light and dark screens, from phones to desktops.

Text has a contrast of at least 4.5:1 in both schemes.
"""

from __future__ import annotations

import gradio as gr

CSS = """
.gradio-container {width: 100% !important; max-width: 1240px !important; margin: 0 auto !important;
  --colour-first: #2456d6; --colour-on-first: #fff; --colour-second: #c2570c;
  --colour-other: #64748b; --colour-focus: #2456d6}
.dark .gradio-container, .gradio-container.dark {--colour-first: #8fb0ff;
  --colour-on-first: #0b1020; --colour-second: #fba04f; --colour-other: #94a3b8;
  --colour-focus: #8fb0ff}
footer {display: none !important}
.gradio-container :is(button, input, textarea, a, [tabindex]):focus-visible,
.gradio-container .choice:has(:focus-visible) {
  outline: 3px solid var(--colour-focus) !important; outline-offset: 2px !important}
.gradio-container .choice :focus-visible {outline: none !important}
.gradio-container button[role=tab][aria-selected=true] {color: var(--body-text-color);
  font-weight: 600}
.gradio-container button[role=tab][aria-selected=true]::after {
  background-color: var(--colour-first)}
.gradio-container ul[role=listbox] {overflow-x: auto}
.gradio-container ul[role=listbox] li {white-space: nowrap; min-width: max-content}
.block.card {border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg);
  padding: 6px; background: var(--block-background-fill)}
.block.card:not(:has(.mbpa, > .wrap.translucent:not(.hide))) {display: none}
.block.drop {border: 1px dashed var(--border-color-primary) !important}
.block:has(> .wrap.translucent:not(.hide)) {min-height: 40px}
.block > .wrap.translucent:not(.hide) > * {display: none}
.block:has(> .wrap.translucent:not(.hide))::after {content: "Working …";
  position: absolute; z-index: 31;
  top: 8px; right: 10px; padding: 1px 12px; border-radius: 99px; font-size: 14px;
  color: var(--body-text-color); background: var(--body-background-fill);
  box-shadow: inset 0 0 0 1px var(--body-text-color)}
#title .html-container {padding: 0}
#message {align-self: center; text-align: right}
.beside {align-self: center}
.mbpa {font-size: 15px; line-height: 1.45; color: var(--body-text-color);
  overflow-wrap: break-word}
.mbpa h1 {font-size: 28px; font-weight: 700; letter-spacing: -.02em; margin: 0}
.mbpa h2 {font-size: 16px; font-weight: 650; margin: 0 0 6px}
.mbpa p {margin: 0 0 6px}
.mbpa ol.steps {margin: 0; padding-left: 22px; list-style: decimal}
.mbpa ol.steps li {margin: 6px 0; padding-left: 2px}
.mbpa .quiet, .mbpa.quiet {color: var(--body-text-color-subdued); font-weight: 400;
  font-size: 13px}
.mbpa .verdict {display: flex; align-items: baseline; gap: 6px 10px; flex-wrap: wrap;
  margin: 2px 0 6px}
.mbpa .verdict b {font-size: 22px; font-weight: 650; min-width: 0}
.mbpa .tag {border-radius: 99px; padding: 1px 10px; font-size: 13px;
  color: var(--colour-on-first); background: var(--colour-first)}
.mbpa .tag.unsure {color: var(--body-text-color); background: none;
  box-shadow: inset 0 0 0 1px var(--body-text-color)}
.mbpa .bars {display: grid; gap: 10px; margin: 14px 0 12px; padding: 0; list-style: none}
.mbpa .bars li, .mbpa .sources li {display: flex; flex-wrap: wrap; gap: 2px 16px;
  justify-content: space-between; align-items: baseline}
.mbpa .bars li {display: grid; grid-template-columns: minmax(0, 1fr) auto}
.mbpa .bar {grid-column: 1 / -1; height: 8px; border-radius: 4px; min-width: 2px}
.mbpa .bar.before {background: none; border: 1px solid var(--colour-other); height: 5px}
.mbpa .number {font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap}
.mbpa .sources {margin: 0; padding: 0; list-style: none}
.mbpa .sources li {padding: 7px 0; border-top: 1px solid var(--border-color-primary)}
.mbpa .sources .what {flex: 1 0 100%}
.mbpa .chips {display: flex; flex-wrap: wrap; gap: 2px 14px}
.mbpa .chip {display: inline-flex; align-items: baseline; min-width: 0}
.mbpa .chip > span {min-width: 0}
.mbpa .chip > .dot {flex: none; width: 9px; height: 9px; border-radius: 9px; margin-right: 7px}
.mbpa .dot.thin {height: 5px; border-radius: 3px; border: 1px solid var(--colour-other);
  align-self: center; width: 18px}
.mbpa img {display: block; border-radius: 4px; object-fit: contain; background: #8882}
.mbpa.asked {display: flex; gap: 18px; flex-wrap: wrap}
.mbpa.asked > div {flex: 1 1 240px; min-width: 0}
.mbpa.asked > img {flex: none; width: 120px; height: 120px}
.mbpa :is(.what, .choice) img {width: 44px; height: 44px}
.mbpa img.large {width: 160px; height: 160px}
.mbpa svg {width: 100%; height: auto; display: block}
.mbpa.rows {max-height: 640px; overflow-y: auto; border: 0; margin: 0; padding: 3px; min-width: 0}
.mbpa.rows legend {position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap}
.mbpa .choice {display: flex; gap: 12px; padding: 9px 8px; border-radius: 6px; cursor: pointer;
  align-items: flex-start}
.mbpa .choice + .choice {border-top: 1px solid var(--border-color-primary)}
.mbpa .choice:hover {background: var(--background-fill-secondary)}
.mbpa .choice:has(:checked) {background: var(--color-accent-soft)}
.mbpa .choice input {flex: none; width: 17px; height: 17px; margin: 3px 0 0;
  appearance: auto !important; accent-color: var(--colour-first)}
.dark .choice input {color-scheme: dark}
.mbpa .choice > div {flex: 1; min-width: 0}
@media (max-width: 640px) {
  .beside {flex: 1 1 100% !important; width: 100% !important}
  ul[role=listbox] li {font-size: 13px}
  #undo {flex: 0 0 auto !important; width: auto !important}
  #header {display: contents}
  #bar {position: sticky; top: 0; z-index: 20; padding: 6px 0;
    background: var(--body-background-fill)}
  #bar > .row {flex-wrap: nowrap}
  #message {text-align: left; flex: 1 1 auto}
  .mbpa.rows {max-height: 50vh}
}
"""

# Gradio opens a dropdown again when a visitor leaves it with the tabulator key.
HEAD = """<script>
addEventListener("keydown", event => {
  if (["Tab", "Shift"].includes(event.key) && event.target.role === "combobox")
    event.stopPropagation();
}, true);
</script>"""


def make_theme() -> gr.themes.Base:
    """Return Gradio's default theme with the system's fonts and darker greys."""
    return gr.themes.Default(
        primary_hue="indigo",
        secondary_hue="indigo",
        neutral_hue="slate",
        radius_size="lg",
        font=("ui-sans-serif", "system-ui", "sans-serif"),
        font_mono=("ui-monospace", "monospace"),
    ).set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_label_text_color="*neutral_700",
        block_title_text_color="*neutral_700",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        checkbox_border_color="*neutral_500",
        checkbox_border_color_dark="*neutral_400",
        button_cancel_background_fill="#b91c1c",
        button_cancel_background_fill_hover="#991b1b",
    )
