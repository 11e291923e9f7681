// How marp-cli builds the decks: nothing is loaded from elsewhere, neither emoji pictures nor fonts of formulas.
export default {
  options: { emoji: { shortcode: false, unicode: false }, math: false },
  // Figures stand in the deck itself, as data: addresses, which markdown-it refuses for SVG. The decks are our own.
  engine: ({ marp }) => {
    marp.markdown.validateLink = (address) => /^(data:image\/svg\+xml;base64,|https:|\.\.?\/)/.test(address)
    return marp
  },
}
