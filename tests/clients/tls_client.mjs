// Run by test_sdk_tls.py: the unmodified `e2b` package from npm, told a domain, a key and whom to trust, no more.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'

const { Sandbox } = createRequire(process.env.AENV_TEST_NPM + '/')('e2b')

const sandbox = await Sandbox.create('base', { timeoutMs: 300_000, requestTimeoutMs: 120_000 })
try {
  assert.equal((await sandbox.commands.run('echo over TLS')).stdout, 'over TLS\n')
  await sandbox.files.write('/home/user/file.txt', 'content')
  const link = await sandbox.downloadUrl('/home/user/file.txt', { useSignatureExpiration: 60_000 })
  assert.ok(link.startsWith(`https://${sandbox.getHost(49983)}/`), link)
  assert.equal(await (await fetch(link)).text(), 'content')

  const command = await sandbox.commands.run(
    'exec python3 -u -c "import http.server as h; s = h.HTTPServer((\'\', 8123), h.SimpleHTTPRequestHandler); print(1); s.serve_forever()"',
    { background: true, timeoutMs: 0, cwd: '/home/user' },
  )
  while (!command.stdout) await new Promise((resolve) => setTimeout(resolve, 20))
  const answer = await fetch(`https://${sandbox.getHost(8123)}/file.txt`)
  assert.deepEqual([answer.status, await answer.text()], [200, 'content'])
  await command.kill()
  console.log(JSON.stringify({ host: sandbox.getHost(8123) }))
} finally {
  await sandbox.kill()
}
