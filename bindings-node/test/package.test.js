'use strict'

// The packages as they are shipped, installed into an empty project.

const assert = require('node:assert/strict')
const { execFile } = require('node:child_process')
const { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } = require('node:fs')
const { tmpdir } = require('node:os')
const { join } = require('node:path')
const { promisify } = require('node:util')
const test = require('node:test')

const { version } = require('..')

const run = promisify(execFile)
const GUIDE = readFileSync(join(__dirname, '../../docs/node.md'), 'utf8')

test('the packed package works in an empty project, by import and by require', async (t) => {
  const folder = mkdtempSync(join(tmpdir(), 'kvlane-package-'))
  t.after(() => rmSync(folder, { recursive: true }))
  const packed = join(folder, 'packed')
  await run(process.execPath, [join(__dirname, '../scripts/pack.mjs'), packed])
  const files = readdirSync(packed)
  assert.equal(files.length, 2, files.join()) // the package and this platform's
  assert.ok(files.includes(`kvlane-${version()}.tgz`))

  const project = join(folder, 'project')
  mkdirSync(project)
  writeFileSync(join(project, 'package.json'), '{"private": true}')
  const npm = process.platform === 'win32' ? 'npm.cmd' : 'npm'
  const archives = files.map((file) => join(packed, file))
  await run(npm, ['install', '--offline', '--no-audit', '--no-fund', '--loglevel=error', ...archives], {
    cwd: project,
    shell: process.platform === 'win32',
  })

  const installed = join(project, 'node_modules/kvlane')
  assert.deepEqual(readdirSync(installed).sort(), [
    'README.md',
    'gateway.d.mts',
    'gateway.d.ts',
    'gateway.js',
    'gateway.mjs',
    'index.d.mts',
    'index.d.ts',
    'index.js',
    'index.mjs',
    'lib',
    'native.js',
    'package.json',
  ])
  const manifest = JSON.parse(readFileSync(join(installed, 'package.json'), 'utf8'))
  const optional = Object.keys(manifest.optionalDependencies)
  assert.equal(optional.length, manifest.napi.targets.length)
  assert.ok(optional.includes('kvlane-linux-x64-gnu') && optional.includes('kvlane-win32-x64-msvc'))
  assert.equal(manifest.dependencies, undefined)
  assert.equal(manifest.scripts, undefined)

  const example = GUIDE.match(/## Ten lines\n\n```js\n([\s\S]*?)```/)[1]
  writeFileSync(join(project, 'import.mjs'), example)
  writeFileSync(join(project, 'require.cjs'), example.replace(/import (\{.*\}) from ('.*')/, 'const $1 = require($2)'))
  for (const file of ['import.mjs', 'require.cjs']) {
    const { stdout } = await run(process.execPath, [join(project, file)], { cwd: project, timeout: 20_000 })
    assert.match(stdout, /^w[12] holds 0 blocks\ntrue\n$/, file)
  }

  // Declarations are found by both ways of resolving.
  writeFileSync(join(project, 'use.mts'), "import { Router } from 'kvlane'\nimport { selectFor } from 'kvlane/gateway'\nexport const id: string | undefined = selectFor(new Router(), [1])?.id\n")
  writeFileSync(join(project, 'use.cts'), "import kvlane = require('kvlane')\nimport gateway = require('kvlane/gateway')\nexport const id: string | undefined = gateway.selectFor(new kvlane.Router(), [1])?.id\n")
  const tsc = require.resolve('typescript/bin/tsc')
  const types = join(__dirname, '../node_modules/@types')
  const flags = ['--strict', '--noEmit', '--module', 'nodenext', '--typeRoots', types, '--types', 'node']
  await run(process.execPath, [tsc, ...flags, 'use.mts', 'use.cts'], { cwd: project }).catch((error) => {
    throw new Error(error.stdout)
  })
})
