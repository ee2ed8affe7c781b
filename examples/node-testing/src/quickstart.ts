import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'

import { startEngine } from './engine.js'
import { launch, type Launched } from './process.js'

/**
 * Starts a gateway as its README says: `node dist/src/main.js` with the README's configuration, whose two workers are engines
 * that run. Returns the port that it tells of.
 */
export async function quickstart(t: TestContext, example: URL, main: URL): Promise<Launched & { port: number }> {
  const readme = await readFile(new URL('README.md', example), 'utf8')
  let configuration = readme.match(/```json\n([\s\S]*?)```/)?.[1] ?? ''
  const engines = await Promise.all(['w1', 'w2'].map((id) => startEngine(t, id)))
  const replaced = new Map([
    ['0.0.0.0:9002', '127.0.0.1:0'],
    ['"port": 8080', '"port": 0'],
  ])
  engines.forEach(({ endpoint, events, replay }, index) => {
    replaced.set(`127.0.0.1:${8_001 + index}`, endpoint)
    replaced.set(`tcp://127.0.0.1:55${index ? 6 : 5}7`, events)
    replaced.set(`tcp://127.0.0.1:55${index ? 6 : 5}8`, replay)
  })
  for (const [from, to] of replaced) configuration = configuration.replace(from, to)
  if (/800[12]|55[56][78]|9002|8080/.test(configuration)) throw new Error(`a port is still that of the README: ${configuration}`)
  const folder = await mkdtemp(join(tmpdir(), 'kvlane-quickstart-'))
  t.after(() => rm(folder, { recursive: true }))
  const file = join(folder, 'configuration.json')
  await writeFile(file, configuration)
  const { found, ...launched } = await launch(t, process.execPath, [fileURLToPath(main), file], (output) => output.match(/port (\d+)/)?.[1])
  return { ...launched, port: Number(found) }
}
