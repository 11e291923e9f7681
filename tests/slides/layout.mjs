// Prints, per slide of a built deck, what does not fit: `node layout.mjs DECK.html BROWSER MODULES`, JSON on stdout.
import { createRequire } from 'node:module'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { pathToFileURL } from 'node:url'

const [deck, executablePath, modules] = process.argv.slice(2)
const puppeteer = createRequire(join(modules, 'here.js'))('puppeteer-core')
const userDataDir = mkdtempSync(join(tmpdir(), 'deck-'))
const args = ['--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking']
args.push('--disable-component-update', '--disable-sync')
if (process.getuid() === 0) args.push('--no-sandbox')
const browser = await puppeteer.launch({ executablePath, args, userDataDir, headless: true })
try {
  const page = await browser.newPage()
  const asked = []
  page.on('request', (request) => asked.push(request.url().slice(0, 100)))
  await page.setViewport({ width: 1280, height: 720 })
  await page.goto(pathToFileURL(deck).href)
  await page.evaluate(() => document.fonts.ready)
  const slides = await page.evaluate(() =>
    [...document.querySelectorAll('section')].map((section) => {
      // In the slide's own pixels: a slide that is not the current one may be drawn at another scale.
      const box = (element) => element.getBoundingClientRect()
      const whole = box(section)
      const scale = whole.height / 720
      const parts = [...section.children].map((part) => ({
        tag: part.tagName.toLowerCase(),
        top: (box(part).top - whole.top) / scale,
        bottom: (box(part).bottom - whole.top) / scale,
        over: Math.max(0, part.scrollWidth - part.clientWidth),
      }))
      const image = section.querySelector('img')
      return {
        title: section.querySelector('h1').textContent,
        parts,
        figure: image && { height: box(image).height / scale, loaded: image.naturalWidth > 0 },
        type: [...section.querySelectorAll('h1, p, td, blockquote, footer')].map((e) => parseFloat(getComputedStyle(e).fontSize)),
      }
    }),
  )
  const fonts = await page.evaluate(() => [...document.fonts].map((face) => `${face.family} ${face.weight} ${face.status}`))
  console.log(JSON.stringify({ slides, fonts, asked: asked.filter((url) => !url.startsWith('data:')) }))
} finally {
  await browser.close()
  rmSync(userDataDir, { recursive: true, force: true })
}
