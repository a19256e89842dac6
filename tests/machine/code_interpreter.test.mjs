// The unmodified `@e2b/code-interpreter` from npm. Run by test_interpreter_template.py.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import { after, before, test } from 'node:test'

const require = createRequire(process.env.AENV_TEST_NPM + '/')
const { Sandbox } = require('@e2b/code-interpreter')

let sandbox
before(async () => { sandbox = await Sandbox.create({ timeoutMs: 600_000, requestTimeoutMs: 120_000 }) })
after(async () => { await sandbox?.kill() })

test('results and state', async () => {
  await sandbox.runCode('x = 41')
  assert.equal((await sandbox.runCode('x + 1')).text, '42')
  assert.equal((await sandbox.runCode('1 + 1', { language: 'js', timeoutMs: 300_000 })).text, '2')
})

test('output and errors', async () => {
  const out = []
  const execution = await sandbox.runCode('print("a"); 1/0', { onStdout: (message) => out.push(message.line) })
  assert.deepEqual([out, execution.error.name], [['a\n'], 'ZeroDivisionError'])
})

test('charts', async () => {
  const { results } = await sandbox.runCode('import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.title("T"); plt.show()')
  assert.deepEqual([results[0].chart.type, results[0].chart.title, results[0].png.length > 0], ['line', 'T', true])
})

test('contexts', async () => {
  const context = await sandbox.createCodeContext({ cwd: '/tmp', requestTimeoutMs: 300_000 })
  assert.equal((await sandbox.runCode('import os; os.getcwd()', { context })).text, '/tmp')
  await sandbox.removeCodeContext(context)
  assert.ok(!(await sandbox.listCodeContexts()).some((each) => each.id === context.id))
})
