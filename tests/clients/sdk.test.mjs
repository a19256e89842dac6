// The unmodified `e2b` package from npm against a real node. Run by test_sdk_javascript.py.
import assert from 'node:assert/strict'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { after, before, test } from 'node:test'

const require = createRequire(process.env.AENV_TEST_NPM + '/')
const { Sandbox, Template, BuildError, CommandExitError, NotFoundError } = require('e2b')

let sandbox
before(async () => { sandbox = await Sandbox.create('base', { timeoutMs: 300_000, metadata: { by: 'javascript' } }) })
after(async () => { await sandbox?.kill() })

test('commands', async () => {
  const result = await sandbox.commands.run('echo out; echo err >&2; whoami')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\nuser\n', 'err\n', 0])
  await assert.rejects(sandbox.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
})

test('a background command with stdin', async () => {
  const command = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(command.pid, 'typed\n')
  await sandbox.commands.closeStdin(command.pid)
  assert.equal((await command.wait()).stdout, 'typed\n')
})

test('files', async () => {
  await sandbox.files.write('dir/file.txt', 'content')
  assert.equal(await sandbox.files.read('dir/file.txt'), 'content')
  assert.deepEqual((await sandbox.files.list('dir')).map((entry) => entry.name), ['file.txt'])
  await assert.rejects(sandbox.files.read('missing.txt'), NotFoundError)
  await sandbox.files.write('bytes.bin', new Uint8Array([0, 255, 10]).buffer)
  assert.deepEqual([...(await sandbox.files.read('bytes.bin', { format: 'bytes' }))], [0, 255, 10])
})

test('a watcher', async () => {
  await sandbox.files.makeDir('watched')
  const seen = []
  let done
  const written = new Promise((resolve) => { done = resolve })
  const handle = await sandbox.files.watchDir('watched', (event) => {
    seen.push(event.type)
    if (event.type === 'write') done()
  })
  await sandbox.files.write('watched/a.txt', 'a')
  await written
  await handle.stop()
  assert.deepEqual(seen, ['create', 'chmod', 'write'])
})

test('a terminal', async () => {
  let shown = ''
  const decoder = new TextDecoder()
  const terminal = await sandbox.pty.create({ cols: 90, rows: 33, onData: (data) => { shown += decoder.decode(data) } })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
  await terminal.wait()
  assert.match(shown, /33 90/)
})

test('life', async () => {
  const info = await sandbox.getInfo()
  assert.equal(info.metadata.by, 'javascript')
  const listed = await Sandbox.list({ query: { metadata: { by: 'javascript' } } }).nextItems()
  assert.deepEqual(listed.map((item) => item.sandboxId), [sandbox.sandboxId])
  assert.equal(await sandbox.isRunning(), true)
  const { memUsed, memTotal } = (await sandbox.getMetrics()).at(-1)
  assert.ok(memUsed > 0 && memUsed < memTotal)
  const other = await Sandbox.create('base', { timeoutMs: 60_000 })
  assert.equal(await other.kill(), true)
  assert.equal(await other.isRunning(), false)
  assert.equal(await Sandbox.kill(other.sandboxId), false)
})

test('templates', async () => {
  const fileContextPath = mkdtempSync(`${tmpdir()}/context-`)
  writeFileSync(`${fileContextPath}/a.txt`, 'copied')
  const lines = []
  const template = Template({ fileContextPath }).fromTemplate('base').copy('*.txt', 'in/').setEnvs({ A: '1' }).runCmd('cat in/a.txt')
  const built = await Template.build(template, 'by-javascript:v1', { onBuildLogs: (entry) => lines.push(entry.message) })
  assert.ok(lines.includes('[stdout]: copied'))
  assert.deepEqual((await Template.getTags('by-javascript')).map((tag) => [tag.tag, tag.buildId]), [['v1', built.buildId]])
  const made = await Sandbox.create('by-javascript:v1', { timeoutMs: 60_000 })
  assert.equal((await made.commands.run('echo $A; cat in/a.txt')).stdout, '1\ncopied')
  await made.kill()
  const failing = Template().fromTemplate('base').runCmd('exit 3')
  await assert.rejects(Template.build(failing, 'by-javascript'), (error) => error instanceof BuildError && /exit status 3/.test(error.message))
})
