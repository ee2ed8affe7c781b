// Packs the package and one for each platform that was built here: node scripts/pack.mjs [FOLDER]
//
// The package names those of all platforms as optional dependencies; npm installs the one that fits.
import { execFileSync } from 'node:child_process'
import { copyFileSync, cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs'
import { dirname, join, resolve } from 'node:path'
import { fileURLToPath } from 'node:url'

const source = dirname(dirname(fileURLToPath(import.meta.url)))
const out = resolve(process.argv[2] ?? join(source, '../target/npm'))
const stage = join(out, 'stage')

rmSync(stage, { recursive: true, force: true })
mkdirSync(stage, { recursive: true })
// napi writes inside of the project alone.
const platforms = join(source, 'npm')
rmSync(platforms, { recursive: true, force: true })
run('node', [join(source, 'node_modules/@napi-rs/cli/dist/cli.js'), 'create-npm-dirs'], source)

const optional = {}
for (const platform of readdirSync(platforms)) {
  const folder = join(platforms, platform)
  const { name, version, main } = readPackage(folder)
  optional[name] = version
  if (!existsSync(join(source, main))) continue
  copyFileSync(join(source, main), join(folder, main))
  pack(folder)
}
if (!readdirSync(out).some((file) => file.endsWith('.tgz'))) throw new Error('nothing was built: npm run build')

const { scripts, devDependencies, ...published } = readPackage(source)
const main = join(stage, 'main')
mkdirSync(main)
for (const file of published.files) cpSync(join(source, file), join(main, file), { recursive: true })
copyFileSync(join(source, '../docs/node.md'), join(main, 'README.md'))
writeFileSync(join(main, 'package.json'), `${JSON.stringify({ ...published, optionalDependencies: optional }, null, 2)}\n`)
pack(main)
rmSync(stage, { recursive: true })
rmSync(platforms, { recursive: true })

function readPackage(folder) {
  return JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
}

function pack(folder) {
  console.log(join(out, run('npm', ['pack', '--silent', '--pack-destination', out], folder).trim()))
}

function run(command, args, cwd) {
  return execFileSync(command, args, { cwd, encoding: 'utf8', stdio: ['ignore', 'pipe', 'inherit'], shell: process.platform === 'win32' })
}
