// Comments that a Rust macro passes on reach the type definitions with the mark of a raw string, ` r" `: takes it off.
import { readFileSync, writeFileSync } from 'node:fs'

const path = new URL('../index.d.ts', import.meta.url)
writeFileSync(path, readFileSync(path, 'utf8').replaceAll('/** r" ', '/** '))
