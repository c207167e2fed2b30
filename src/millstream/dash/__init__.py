"""`millstream dash`: a web page that shows run folders, of active runs and of others. It only reads, and needs no torch.

api.py   the answers, as structs; `front/src/api.ts` is written from it        typescript.py  which does that        front/
the sources of the page        static/  the page, as it is served"""
