// Colour scales that people with any colour vision can read, and text that stands out on them.

const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725"];
const BELOW = ["#08519c", "#3a86c8", "#9ecae1"];
const ABOVE = ["#fdbe85", "#e6711b", "#a63603"];
const RUNS = {
  light: ["#0b6e8f", "#c2410c", "#6b4fbb", "#2f7d32", "#b0276b", "#7a5c00"],
  dark: ["#56b4d9", "#f0934e", "#a996f5", "#6fc276", "#ef7fb6", "#d9bb4a"],
};

const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
const ramp = (stops) => stops.map(rgb);

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
// One of the style sheet's colours, for a canvas: "#rrggbb".
export function ink(name) {
  const pair = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).match(/#\w+/g);
  const hex = pair[isDark() ? 1 : 0];
  return hex.length === 4 ? `#${[...hex.slice(1)].map((c) => c + c).join("")}` : hex;
}
export const runColour = (k) => RUNS[isDark() ? "dark" : "light"][k % 6];

function at(stops, x) {
  const place = Math.min(Math.max(x, 0), 1) * (stops.length - 1);
  const k = Math.min(Math.floor(place), stops.length - 2);
  return stops[k].map((low, c) => Math.round(low + (stops[k + 1][c] - low) * (place - k)));
}

const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const onto = (colour) => (luminance(colour) > 0.179 ? "#000" : "#fff"); // the better of the two, at least 4.5 to 1
const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// {low, high, colour(value) -> [background, text]}. Signed values have zero in the middle, in the page's own colour.
export function scale(values, { signed = false, low, high } = {}) {
  const found = values.filter((v) => typeof v === "number" && Number.isFinite(v)).sort((a, b) => a - b);
  const quantile = (q) => found[Math.round(q * (found.length - 1))] ?? 0;
  low ??= quantile(0.01);
  high ??= quantile(0.99);
  if (signed) [low, high] = [-Math.max(-low, high, 1e-9), Math.max(-low, high, 1e-9)];
  else if (high <= low) high = low + (Math.abs(low) || 1) * 1e-6;
  const shades = isDark() ? VIRIDIS.slice(2) : VIRIDIS; // the darkest are not seen in the dark
  const stops = signed ? ramp([...BELOW, ink("paper"), ...ABOVE]) : ramp(shades);
  const colour = (value) => {
    const found = at(stops, (value - low) / (high - low));
    return [css(found), onto(found)];
  };
  return { low, high, colour };
}
