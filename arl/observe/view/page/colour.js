// Colour scales that people with any colour vision can read, and text that stands out on them.

const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725"];
const BELOW = ["#08519c", "#3a86c8", "#9ecae1"];
const ABOVE = ["#fdbe85", "#e6711b", "#a63603"];

// In the light, and in the dark.
export const [BLUE, ORANGE, PURPLE, GREEN, PINK, OCHRE] = [
  ["#0b6e8f", "#56b4d9"], ["#c2410c", "#f0934e"], ["#6b4fbb", "#a996f5"], ["#2f7d32", "#6fc276"], ["#b0276b", "#ef7fb6"], ["#8a6a0f", "#d9bb4a"],
];
export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const tone = (pair) => pair[Number(isDark())];
export const runColour = (k) => tone([BLUE, ORANGE, PURPLE, GREEN, PINK, OCHRE][k % 6]);
// One of the style sheet's colours, for a canvas.
export const ink = (name) => tone(getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).match(/#\w+/g));

const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

function at(stops, x) {
  const place = Math.min(Math.max(x, 0), 1) * (stops.length - 1);
  const k = Math.min(Math.floor(place), stops.length - 2);
  return stops[k].map((low, c) => Math.round(low + (stops[k + 1][c] - low) * (place - k)));
}

const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);

// {low, high, colour(value) -> [background, text]}. Signed values have zero in the middle, in the page's own colour.
export function scale(values, { signed = false, low, high } = {}) {
  const found = values.filter((v) => typeof v === "number").sort((a, b) => a - b);
  const quantile = (q) => found[Math.round(q * (found.length - 1))] ?? 0;
  low ??= quantile(0.01);
  high ??= quantile(0.99);
  if (signed) [low, high] = [-Math.max(-low, high, 1e-9), Math.max(-low, high, 1e-9)];
  else if (high <= low) [low, high] = [low - 1e-6 * (Math.abs(low) || 1), low + 1e-6 * (Math.abs(low) || 1)]; // all are in the middle
  const shades = isDark() ? VIRIDIS.slice(2) : VIRIDIS; // the darkest are not seen in the dark
  const stops = (signed ? [...BELOW, ink("paper"), ...ABOVE] : shades).map(rgb);
  const colour = (value) => {
    const shade = at(stops, (value - low) / (high - low));
    return [`rgb(${shade.join(" ")})`, luminance(shade) > 0.179 ? "#000" : "#fff"]; // the better of the two, at least 4.5 to 1
  };
  return { low, high, colour };
}

// Of rewards, most of which lie between 0 and 1: equal ones have the colour of their height.
export function rewardScale(rewards) {
  const { low, high } = scale(rewards);
  return scale([], { low: Math.min(low, 0), high: Math.max(high, 1) }).colour;
}
