// What the tests of the gateways share: engines, Envoy, the workload, and how to wait.

export { startEngine, type Engine } from './engine.js'
export { startEnvoy, type Envoy } from './envoy.js'
export { plainEnvoy } from './plain.js'
export { testAudit, testEndings, testWorkload, type Start, type Subject, type SubjectOptions } from './gateway.js'
export { launch, type Launched } from './process.js'
export { quickstart } from './quickstart.js'
export { openAnswer, type OpenAnswer } from './stream.js'
export { until } from './until.js'
export { answerOf, chatWorkload, play, tokenWorkload, type Body, type Play } from './workload.js'
